"""How the ids that experts receive are read: one general rule, and one table of exceptions.

The rule: an experts module is called as ``experts(hidden_states, ids, weights)``; it is known by
the names of those parameters, so a model written that way is understood without being listed. What
a router computes on the way there (logits, scores) is never used: a bias, groups or a hash may
still change the choice after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: (ids, weights) of one call: ids [..., k] integers, -1 where a pick ran no expert; weights of the
#: same shape, or None.
Reading = tuple["torch.Tensor", "torch.Tensor | None"]
#: reads a call: module, positional arguments, keyword arguments, and what it returned (or None)
Reader = Callable[["torch.nn.Module", tuple[Any, ...], dict[str, Any], Any], Reading]

_ID_NAMES = frozenset({
    "top_k_index", "top_k_indices", "topk_index", "topk_indices", "topk_idx", "topk_ids",
    "router_indices", "selected_experts", "expert_index", "expert_indices", "expert_ids",
    "indices",
})  # fmt: skip
_WEIGHT_WORDS = ("weight", "score", "prob", "gate")


@dataclass(frozen=True)
class Adapter:
    """How one kind of module is read.

    Attributes:
        read: takes (ids, weights) out of a call.
        on_output: read after the module ran (a forward hook), because its arguments do not tell.
        note: what is special, for the documentation.
        only_in: a piece of the path the module must have; the same class elsewhere is no MoE layer.
    """

    read: Reader
    on_output: bool = False
    note: str = ""
    only_in: str = ""


def argument(position: int, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A function that takes one argument out of a call, however it was passed."""

    def get(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[position] if len(args) > position else kwargs.get(name)

    return get


def by_signature(module: torch.nn.Module) -> Adapter | None:
    """The general rule; None for a module whose forward is not that of experts."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return None
    if len(names) < 3 or names[1] not in _ID_NAMES:
        return None
    if not any(word in names[2] for word in _WEIGHT_WORDS):
        return None
    ids, weights = argument(1, names[1]), argument(2, names[2])

    def read(_m: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> Reading:
        return ids(args, kwargs), weights(args, kwargs)

    return Adapter(read)


_ids, _weights = argument(1, "top_k_index"), argument(2, "top_k_weights")


def _plain(_m: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> Reading:
    return _ids(args, kwargs), _weights(args, kwargs)


def _switch(_m: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> Reading:
    chosen = argument(1, "selected_experts")(args, kwargs)  # one-hot [tokens, 1, n_expert]
    weights = argument(2, "routing_weights")(args, kwargs)
    ids = chosen.argmax(-1)
    return ids.masked_fill(chosen.sum(-1) == 0, -1), weights  # beyond the expert's capacity


def _longcat(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> Reading:
    ids, weights = _plain(module, args, kwargs, None)
    return ids.masked_fill(ids >= module.num_routed_experts, -1), weights


def _zaya(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> Reading:
    ids, weights = _plain(module, args, kwargs, None)
    return ids.masked_fill(weights == 0, -1), weights


def _llama4(module: Any, _args: Any, _kwargs: Any, out: Any) -> Reading:
    scores, logits = out
    ids = logits.topk(module.top_k, dim=1).indices
    return ids, scores.gather(1, ids)


def _jetmoe(module: Any, _args: Any, _kwargs: Any, out: Any) -> Reading:
    best = out[-1].topk(module.top_k, dim=1)
    return best.indices, best.values.softmax(1)


#: Modules that the general rule would miss or misread, by class name.
EXCEPTIONS: dict[str, Adapter] = {
    "SwitchTransformersExperts": Adapter(
        _switch, note="one-hot ids; tokens beyond an expert's capacity run none"
    ),
    "LongcatFlashExperts": Adapter(_longcat, note="ids of identity experts are dropped"),
    "ZayaExperts": Adapter(_zaya, note="skipped tokens come as expert 0 with weight 0: dropped"),
    "Llama4Router": Adapter(
        _llama4, on_output=True, note="experts run densely: the router's own top-k"
    ),
    "JetMoeTopKGating": Adapter(
        _jetmoe,
        on_output=True,
        only_in=".mlp.",
        note="the MLP's router; attention experts left out",
    ),
}

#: Modules named like experts that are covered by another site, or are no experts of an MLP.
COVERED = frozenset({"Llama4TextExperts", "JetMoeMoA"})

#: Architectures that cannot be captured, by the class name of a module, with the reason.
REFUSED: dict[str, str] = {
    "NllbMoeExperts": "its experts receive a mask of 0 and 1 in place of ids, and drop tokens",
    "DogeCDMoE": "its experts are product keys without weights of their own to cache",
}
