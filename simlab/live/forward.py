"""What an experts module does in a run from the slot pool: the reference path and the fast path.

reference: the module's own loop over experts, with each weight read from its slot. Same kernels,
same shapes, same order of summation as in the whole model, so the same bits.

fast: transformers' grouped product over all rows of the pool, with expert ids turned into rows. The
order in which experts are laid out is another one, which a kernel may or may not let through.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simlab.capture.sites import architecture
from simlab.errors import UsageError
from simlab.live.experts import ExpertLayer, MakeForward, Serve, Stand
from simlab.live.pooled import PooledExperts, Served

if TYPE_CHECKING:
    import torch

#: path -> how transformers computes the experts of the model that it is compared with
PATHS = {"reference": "eager", "fast": "grouped_mm"}


def reference(pooled: PooledExperts) -> MakeForward:
    """The module's own loop, fed from the slots."""

    def make(
        layer: ExpertLayer, stands: tuple[Stand, ...], own: Callable[..., Any]
    ) -> Callable[..., Any]:
        call = _Call(layer, own)

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            ids, host = call.ids(args, kwargs)
            served = pooled.serve(layer.index, host[host >= 0])
            if (host < 0).any():
                args, kwargs = call.without_skipped(args, kwargs, ids)
            with _answering(stands, served.weight):
                return own(*args, **kwargs)

        return forward

    return make


def fast(pooled: PooledExperts) -> MakeForward:
    """One grouped product over the pool's rows."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    grouped = ALL_EXPERTS_FUNCTIONS[PATHS["fast"]]

    def make(
        layer: ExpertLayer, stands: tuple[Stand, ...], own: Callable[..., Any]
    ) -> Callable[..., Any]:
        call = _Call(layer, own)
        batched = _Batched(layer, pooled)
        twin = _host_twin(layer, stands) if pooled.cpu_serves else None

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            import torch

            hidden, _, weights = call.arguments(args, kwargs)
            _, host = call.ids(args, kwargs)
            served = pooled.serve(layer.index, host[host >= 0])
            rows = served.stage_all()
            on_cpu = np.isin(host, list(served.on_cpu))
            here = (host >= 0) & ~on_cpu
            table = np.zeros(layer.site.n_expert, np.int64)
            table[list(rows)] = list(rows.values())
            if here.any():
                # picks that run no expert here take any row that holds one, with no weight
                places = np.where(here, table[host], table[host[here][0]])
                if not here.all():
                    kept = torch.from_numpy(here).to(weights.device)
                    weights_here = weights.masked_fill(~kept, 0)
                else:
                    weights_here = weights
                batched.serve(rows)
                out = grouped(
                    batched, hidden, torch.from_numpy(places).to(hidden.device), weights_here
                )
            else:
                out = torch.zeros_like(hidden)
            if on_cpu.any():
                assert twin is not None
                out = out + _on_host(twin, stands, served, hidden, host, weights, on_cpu)
            return out

        return forward

    return make


def check_fast(model: torch.nn.Module, layers: list[ExpertLayer]) -> None:
    """Raise UsageError where transformers has no grouped form of the model's experts."""
    for layer in layers:
        if not layer.batched:
            raise UsageError(
                f"--path fast: transformers has no grouped form of {type(layer.module).__name__}"
                f" ({architecture(model)}); use --path reference"
            )


class _Call:
    """How the arguments of an experts module are read."""

    def __init__(self, layer: ExpertLayer, own: Callable[..., Any]) -> None:
        self._layer = layer
        self._names = list(inspect.signature(own).parameters)[:3]

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """(hidden states, ids, weights), however they were passed."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        return [given[name] for name in self._names]

    def ids(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """Ids as captured [tokens, k], -1 where a pick runs no expert, and the same on the host."""
        ids, _ = self._layer.site.adapter.read(self._layer.module, args, kwargs, None)
        ids = ids.reshape(-1, ids.shape[-1])
        # the one copy and wait a layer that an engine cannot do without
        return ids, np.ascontiguousarray(ids.numpy(force=True), np.int64)

    def without_skipped(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], ids: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with skipped picks given the id behind the last expert, which loops pass over.

        A skipped token may carry the id of an expert with a weight of zero; that expert is not
        served. Ids of identity experts lie behind the last one already.
        """
        hidden, given, weights = self.arguments(args, kwargs)
        n_expert = self._layer.site.n_expert
        skipped = (ids < 0).view(given.shape) & (given < n_expert)
        others = {k: v for k, v in kwargs.items() if k not in self._names}
        return (hidden, given.masked_fill(skipped, n_expert), weights, *args[3:]), others


@contextmanager
def _answering(stands: tuple[Stand, ...], serve: Serve) -> Iterator[None]:
    """The stands of a layer are answered by ``serve`` inside the block."""
    for stand in stands:
        stand.serve = serve
    try:
        yield
    finally:
        for stand in stands:
            stand.serve = None


class _Batched:
    """An experts module as transformers' grouped form sees it, with the pool's rows as experts."""

    def __init__(self, layer: ExpertLayer, pooled: PooledExperts) -> None:
        self._module = layer.module
        for name, rows in zip(layer.names, pooled.rows[layer.index], strict=True):
            setattr(self, name, rows)
        self.num_experts = len(pooled.rows[layer.index][0])
        self._expert_of_row = np.zeros(self.num_experts, np.int64)
        for name, parameter in layer.module.named_parameters(recurse=False):
            if parameter.dim() == 2 and len(parameter) == layer.site.n_expert:
                setattr(self, name, _ByRow(self, parameter))

    def serve(self, rows: dict[int, int]) -> None:
        """Which expert lies in which row, for what stays with the experts (biases)."""
        for expert, row in rows.items():
            self._expert_of_row[row] = expert

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _ByRow:
    """A bias [experts, width], read by rows of the pool."""

    def __init__(self, batched: _Batched, bias: torch.Tensor) -> None:
        self._batched, self._bias = batched, bias

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        import torch

        table = torch.from_numpy(self._batched._expert_of_row).to(rows.device)
        return self._bias[table[rows]]


def _host_twin(layer: ExpertLayer, stands: tuple[Stand, ...]) -> torch.nn.Module:
    """The experts module with all but its stacked weights in host memory."""
    module = layer.module
    twin = copy.copy(module)
    vars(twin).update(vars(module))
    vars(twin)["_parameters"] = {
        name: p if p is None else p.detach().to("cpu") for name, p in module._parameters.items()
    }
    vars(twin)["_buffers"] = {
        name: b if b is None else b.to("cpu") for name, b in module._buffers.items()
    }
    vars(twin)["_modules"] = {
        name: copy.deepcopy(m).to("cpu") for name, m in module._modules.items() if m is not None
    }
    return twin


def _on_host(
    twin: torch.nn.Module,
    stands: tuple[Stand, ...],
    served: Served,
    hidden: torch.Tensor,
    host: npt.NDArray[np.int64],
    weights: torch.Tensor,
    on_cpu: npt.NDArray[np.bool_],
) -> torch.Tensor:
    """What the picks that the CPU serves add to the output, computed from host memory."""
    import torch

    token, pick = np.nonzero(on_cpu)
    at = torch.from_numpy(token).to(hidden.device)
    given = hidden.view(-1, hidden.shape[-1])[at].to("cpu")
    weight = weights[at, torch.from_numpy(pick).to(weights.device)].to("cpu")[:, None]
    with _answering(stands, served.host_weight):
        ids = torch.from_numpy(host[token, pick])[:, None]
        part = _own_forward(type(twin))(twin, given, ids, weight)
    out = torch.zeros_like(hidden).view(-1, hidden.shape[-1])
    out.index_add_(0, at, part.to(hidden.device))
    return out.view(hidden.shape)


def _own_forward(kind: type) -> Callable[..., Any]:
    """The loop over experts as the class was written, without transformers' choice of form."""
    forward: Any = vars(kind)["forward"]
    own: Callable[..., Any] = inspect.unwrap(forward)
    return own
