"""Router picks of any torch MoE: the expert ids as the experts receive them.

    with attach(model) as tap:
        model(input_ids)
        picks = tap.take()      # of this forward pass
        picks.experts()         # int16 [tokens, layers, k], -1 where a pick ran no expert

The hooks keep references to tensors that the model made anyway: nothing is computed, copied or
waited for while the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simlab.capture.need import need_torch
from simlab.capture.sites import HOOK_HELP, Site, architecture, find_sites, n_picks
from simlab.errors import SimlabError

if TYPE_CHECKING:
    import torch

#: From this many tokens on, a copy per layer is cheaper than stacking the layers first.
_STACK_TOKENS = 2048


class Picks:
    """The picks of one forward pass, in the order of the MoE layers.

    Attributes:
        layers: the model's layer numbers, ascending.
        ids: one integer tensor [tokens, k] a layer, on the model's device; -1 where a pick ran no
            expert (identity experts, skipped tokens). k may differ between layers.
        weights: one tensor of the same shape a layer, or None where they were not asked for.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        ids: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor] | None,
    ) -> None:
        self.layers = layers
        self.ids = ids
        self.weights = weights
        # on CUDA the copies start now, so that they are over when they are wanted
        self._ids_copy = _Copy(ids, "int16") if ids[0].is_cuda else None
        self._weights_copy = None
        if weights is not None and weights[0].is_cuda:
            self._weights_copy = _Copy(weights, "float16")

    @property
    def n_tokens(self) -> int:
        """Rows of every layer's tensor."""
        return int(self.ids[0].shape[0])

    def experts(self) -> npt.NDArray[np.int16]:
        """int16 [tokens, layers, k]; -1 pads and marks picks without an expert."""
        if self._ids_copy is not None:
            return self._ids_copy.wait()
        return _gather(self.ids, np.dtype(np.int16), -1)

    def router_weights(self) -> npt.NDArray[np.float16] | None:
        """float16 [tokens, layers, k], or None; what stands beside an id of -1 means nothing."""
        if self.weights is None:
            return None
        if self._weights_copy is not None:
            return self._weights_copy.wait()
        return _gather(self.weights, np.dtype(np.float16), 0)


def _gather(tensors: Sequence[torch.Tensor], kind: np.dtype[Any], fill: int) -> npt.NDArray[Any]:
    import torch

    if len({t.shape for t in tensors}) == 1 and len(tensors[0]) < _STACK_TOKENS:
        stacked = torch.stack(list(tensors), 1).to(getattr(torch, kind.name))
        return np.asarray(stacked.numpy(force=True))
    k = max(t.shape[1] for t in tensors)
    out = np.empty((tensors[0].shape[0], len(tensors), k), kind)
    for i, tensor in enumerate(tensors):
        if tensor.is_floating_point():
            tensor = tensor.float()  # numpy has no bfloat16
        width = tensor.shape[1]
        out[:, i, :width] = tensor.numpy(force=True)
        out[:, i, width:] = fill
    return out


class _Copy:
    """Tensors of one forward pass on their way from CUDA devices into pinned memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], kind: str) -> None:
        import torch

        self._fill = -1 if kind == "int16" else 0
        self._places: list[tuple[list[int], torch.Tensor]] = []
        self._events = []
        together: dict[tuple[Any, ...], list[int]] = {}
        for i, tensor in enumerate(tensors):
            alone = i if len(tensor) >= _STACK_TOKENS else -1
            together.setdefault((tensor.device, tensor.shape, alone), []).append(i)
        for (device, _, _), members in together.items():
            stream = _side_stream(device)
            with torch.cuda.device(device):
                parts = [tensors[i] for i in members]
                small = (torch.stack(parts, 1) if len(parts) > 1 else parts[0][:, None]).to(
                    getattr(torch, kind)
                )
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    # torch keeps pinned blocks and hands one out again only when its copy is over
                    host = torch.empty(small.shape, dtype=small.dtype, pin_memory=True)
                    host.copy_(small, non_blocking=True)
                    small.record_stream(stream)
                    event = torch.cuda.Event()
                    event.record(stream)
            self._places.append((members, host))
            self._events.append(event)
        self._layers = len(tensors)

    def wait(self) -> npt.NDArray[Any]:
        """The array [tokens, layers, k], once the copies are over."""
        for event in self._events:
            event.synchronize()
        if len(self._places) == 1:
            return np.asarray(self._places[0][1].numpy())
        k = max(host.shape[2] for _, host in self._places)
        first = self._places[0][1].numpy()
        out = np.full((len(first), self._layers, k), self._fill, first.dtype)
        for members, host in self._places:
            out[:, members, : host.shape[2]] = host.numpy()
        return out


_side_streams: dict[Any, Any] = {}


def _side_stream(device: torch.device) -> Any:
    import torch

    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


class Tap:
    """Hooks on a model's MoE layers; a context manager that removes them at its end.

    Attributes:
        sites: the MoE layers, ascending.
        moe_layers: their numbers.
        n_expert: experts a layer (the most, should layers differ).
        k: picks a token and layer (the most); 0 while neither the configuration nor a forward pass
            has told.
    """

    def __init__(self, model: torch.nn.Module, sites: list[Site], weights: bool) -> None:
        self.sites = tuple(sites)
        self.moe_layers = tuple(site.layer for site in sites)
        self.n_expert = max(site.n_expert for site in sites)
        self.k = n_picks(model, sites)
        self._name = architecture(model)
        self._weights = weights
        self._seen: list[tuple[Any, Any] | None] = [None] * len(sites)
        self._handles = []
        for i, site in enumerate(sites):
            watch = _watch(self, i, site)
            if site.adapter.on_output:
                handle = site.module.register_forward_hook(watch, with_kwargs=True)
            else:
                handle = site.module.register_forward_pre_hook(watch, with_kwargs=True)
            self._handles.append(handle)

    def take(self) -> Picks:
        """The picks of the forward pass since the last `take` or `discard`.

        Raises:
            SimlabError: a layer was not called in it, or has no weights although they were wanted.
        """
        seen = self._seen
        self.discard()
        ids, weights = [], []
        for site, pair in zip(self.sites, seen, strict=True):
            if pair is None:
                raise SimlabError(
                    f"{self._name}: layer {site.layer} ({site.path}) was not called in a forward"
                    " pass (a fused kernel may go round it: load the model without kernels); or"
                    f" {HOOK_HELP}"
                )
            ids.append(_rows(pair[0]))
            if self._weights:
                if pair[1] is None:
                    raise SimlabError(
                        f"{self._name}: layer {site.layer} ({site.path}) is given no router"
                        " weights; capture without --weights"
                    )
                weights.append(_rows(pair[1].detach()))
        self.k = max(self.k, *(t.shape[1] for t in ids))
        return Picks(self.moe_layers, ids, weights if self._weights else None)

    def discard(self) -> None:
        """Forget what was seen since the last `take` (a warm-up, a pass that failed)."""
        self._seen = [None] * len(self.sites)

    def expert_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of one expert per weight tensor, for each layer; empty where they are not stacked.

        Stacked tensors are counted as the model holds them: gate and up are often one. Biases,
        which caches leave in place, are not counted.
        """
        rows = []
        for site in self.sites:
            stacked = [p for p in site.module.parameters(recurse=False) if p.dim() == 3]
            rows.append(tuple(p[0].numel() * p.element_size() for p in stacked))
        return tuple(rows) if all(rows) else ()

    def close(self) -> None:
        """Remove the hooks; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Tap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _put(self, place: int, pair: tuple[Any, Any]) -> None:
        if self._seen[place] is not None:
            site = self.sites[place]
            self.discard()
            raise SimlabError(
                f"{self._name}: layer {site.layer} ({site.path}) was called twice in one forward"
                " pass, and a trace has one row a token and layer; if that is not the module with"
                f" the experts, {HOOK_HELP}"
            )
        self._seen[place] = pair


def _watch(tap: Tap, place: int, site: Site) -> Any:
    """The hook of one site."""
    read = site.adapter.read

    def watch(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any = None) -> None:
        tap._put(place, read(module, args, kwargs, out))

    return watch


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def attach(model: torch.nn.Module, *, hook: str | None = None, weights: bool = False) -> Tap:
    """Hook the MoE layers of a model.

    Args:
        model: a transformers model, or any torch module with experts called as
            ``experts(hidden_states, top_k_index, top_k_weights)``.
        hook: for other models: ``PATTERN:ARGUMENT`` (see `simlab.capture.sites.find_sites`).
        weights: the router weights too.

    Raises:
        UsageError: torch is not installed, or ``hook`` is not of that form or matches nothing.
        SimlabError: the model has no MoE layer, or one that is not understood.
    """
    need_torch()
    return Tap(model, find_sites(model, hook), weights)
