"""Expert weights taken out of a transformers model for a run, and served one expert at a time.

An experts module holds its weights as stacked parameters [experts, ...] and computes one expert
after another with ``weight[expert]``. For a run each stacked parameter is replaced by a `Stand`
whose ``weight[expert]`` is answered by whoever serves the layer, so the module's own code computes,
with its own numbers in its own order: what comes out is bit for bit what the whole model gives.
Biases and norms stay where they are, as in engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simlab.capture.sites import Site, architecture
from simlab.errors import SimlabError

if TYPE_CHECKING:
    import torch

#: answers ``weight[expert]``: (number of the tensor, expert) -> that expert's weight
Serve = Callable[[int, int], "torch.Tensor"]


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """The stacked expert weights of one MoE layer.

    Attributes:
        site: where the layer is. index: its place among the MoE layers.
        names: the parameters, in the order in which `Tap.expert_bytes` counts them.
        parameters: the parameters themselves, each [experts or more, ...].
    """

    site: Site
    index: int
    names: tuple[str, ...]
    parameters: tuple[torch.nn.Parameter, ...]

    @property
    def module(self) -> torch.nn.Module:
        """The experts module."""
        return self.site.module

    @property
    def batched(self) -> bool:
        """Whether transformers has forms of this module that compute all experts at once."""
        return hasattr(self.module, "is_transposed") and hasattr(self.module, "_apply_gate")


def take_apart(model: torch.nn.Module, sites: Sequence[Site]) -> list[ExpertLayer]:
    """The expert weights of each MoE layer.

    Raises:
        SimlabError: a layer's experts are not stacked, or are not computed one by one.
    """
    layers = []
    for index, site in enumerate(sites):
        stacked = {n: p for n, p in site.module.named_parameters(recurse=False) if p.dim() == 3}
        why = ""
        if site.adapter.on_output:
            why = "its experts are not called with the ids that the router picked"
        elif not stacked:
            why = "its expert weights are not stacked [experts, rows, columns]"
        elif any(len(p) < site.n_expert for p in stacked.values()):
            why = f"some stacked weights hold fewer than its {site.n_expert} experts"
        elif not all(p.is_contiguous() for p in stacked.values()):
            why = "its expert weights are not contiguous"
        if why:
            raise SimlabError(
                f"{architecture(model)}: layer {site.layer} ({site.path},"
                f" {type(site.module).__name__}) cannot be computed from a slot pool: {why};"
                " simlab live TRACE measures its trace all the same"
            )
        layers.append(ExpertLayer(site, index, tuple(stacked), tuple(stacked.values())))
    return layers


class Stand:
    """Stands for a stacked parameter: ``stand[expert]`` is what is served for it.

    Attributes:
        serve: who answers, set for the time of one call of the module.
    """

    def __init__(self, layer: ExpertLayer, number: int) -> None:
        self._name = f"layer {layer.site.layer}: {layer.names[number]}"
        self._number = number
        self._weight = layer.parameters[number]
        self.serve: Serve | None = None

    def __getitem__(self, expert: Any) -> torch.Tensor:
        try:
            one = int(expert)
        except (TypeError, ValueError, RuntimeError):
            raise SimlabError(f"{self._name} is not computed one expert at a time") from None
        if self.serve is None:
            raise SimlabError(f"{self._name} is used outside the experts' forward")
        return self.serve(self._number, one)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._weight.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the stacked parameter."""
        return self._weight.shape


#: makes the forward of a layer: (layer, its stands, its own forward) -> forward
MakeForward = Callable[[ExpertLayer, tuple[Stand, ...], Callable[..., Any]], Callable[..., Any]]


@contextmanager
def taken_out(layers: Sequence[ExpertLayer], make_forward: MakeForward) -> Iterator[None]:
    """Stands in place of the stacked parameters, and other forwards, for the time of the block.

    The modules are as they were afterwards, however the block ends: the same parameter objects
    under the same names in the same order.
    """
    with ExitStack() as undo:
        for layer in layers:
            _take_out(layer, make_forward, undo)
        yield


def _take_out(layer: ExpertLayer, make_forward: MakeForward, undo: ExitStack) -> None:
    module = layer.module
    parameters, own = dict(module._parameters), vars(module).get("forward")
    forward = module.forward

    def restore() -> None:
        for name in (*layer.names, "forward"):
            vars(module).pop(name, None)
        if own is not None:
            vars(module)["forward"] = own
        module._parameters.clear()
        module._parameters.update(parameters)

    undo.callback(restore)
    stands = tuple(Stand(layer, number) for number in range(len(layer.names)))
    for name, stand in zip(layer.names, stands, strict=True):
        del module._parameters[name]
        vars(module)[name] = stand
    vars(module)["forward"] = make_forward(layer, stands, forward)


@contextmanager
def implementation(layers: Sequence[ExpertLayer], name: str) -> Iterator[None]:
    """How transformers computes experts ("eager", "grouped_mm"), for the time of the block."""
    configs = {id(c): c for layer in layers if (c := getattr(layer.module, "config", None))}
    before = {key: c._experts_implementation_internal for key, c in configs.items()}
    try:
        for c in configs.values():
            c._experts_implementation_internal = name
        yield
    finally:
        for key, c in configs.items():
            c._experts_implementation_internal = before[key]
