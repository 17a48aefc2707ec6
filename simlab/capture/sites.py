"""Where a model's MoE layers are: modules found by their forward, layer numbers from their path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from simlab.capture.adapters import COVERED, EXCEPTIONS, REFUSED, Adapter, Reading, by_signature
from simlab.errors import SimlabError, UsageError

if TYPE_CHECKING:
    import torch

_COUNTS = ("num_experts", "num_routed_experts", "n_routed_experts", "num_local_experts",
           "moe_num_experts", "n_experts")  # fmt: skip
_PICKS = ("num_experts_per_tok", "top_k", "moe_top_k", "moe_topk", "num_experts_per_token",
          "top_k_experts", "moe_k")  # fmt: skip
#: parts of a model that see no text token
_OTHER_PARTS = re.compile(r"(^|\.)(vision|visual|image|audio|talker|code2wav)")
#: how to describe a model that is not understood; ends the messages that say so
HOOK_HELP = (
    "name the module that is given the expert ids, and the argument:"
    ' --hook "model.layers.*.mlp.experts:1" (or :NAME; or :out.N for the N-th thing it returns)'
)


@dataclass(frozen=True)
class Site:
    """One MoE layer of a model.

    Attributes:
        layer: the model's layer number, from the module's path; where paths have no numbers, or
            two stacks share them (encoder and decoder), the place in the order of the modules.
        path: the hooked module's path in the model.
        n_expert: experts of this layer.
        module, adapter: what is hooked, and how it is read.
    """

    layer: int
    path: str
    n_expert: int
    module: torch.nn.Module
    adapter: Adapter


def architecture(model: torch.nn.Module) -> str:
    """The model's name in messages: its class."""
    return type(model).__name__


def find_sites(model: torch.nn.Module, hook: str | None = None) -> list[Site]:
    """The MoE layers of a model in ascending order.

    Args:
        hook: ``PATTERN:ARGUMENT``; the modules whose path matches the pattern (``*`` stands for
            anything) are hooked, and only these. ARGUMENT is the place (0 is the first after self)
            or the name of the argument with the ids, or ``out``/``out.N`` for what is returned.

    Raises:
        UsageError: a hook that is not of that form or matches nothing.
        SimlabError: no MoE layer, an experts module that is not understood, or an architecture that
            cannot be captured.
    """
    found = list(_by_hook(model, hook) if hook else _by_rule(model))
    if not found:
        raise SimlabError(f"{architecture(model)}: no MoE layer found; if it has some, {HOOK_HELP}")
    numbers = [_layer_number(path) for path, _, _ in found]
    if None in numbers or len(set(numbers)) != len(numbers):
        numbers = list(range(len(found)))
    sites = [
        Site(number or 0, path, _n_expert(model, path, module), module, adapter)
        for number, (path, module, adapter) in zip(numbers, found, strict=True)
    ]
    return sorted(sites, key=lambda site: site.layer)


def _by_rule(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Adapter]]:
    for path, module in model.named_modules():
        if _OTHER_PARTS.search(path):
            continue
        name = type(module).__name__
        if name in REFUSED:
            raise SimlabError(f"{architecture(model)} cannot be captured: {REFUSED[name]}")
        adapter = EXCEPTIONS.get(name) or by_signature(module)
        if adapter is not None:
            if adapter.only_in in f"{path}.":
                yield path, module, adapter
        elif path.rpartition(".")[2] == "experts" and name not in COVERED:
            raise SimlabError(
                f"{architecture(model)}: {path} ({name}) looks like experts, but it is not called"
                f" with ids and weights; {HOOK_HELP}"
            )


def _by_hook(model: torch.nn.Module, hook: str) -> Iterator[tuple[str, torch.nn.Module, Adapter]]:
    pattern, colon, which = hook.rpartition(":")
    if not (colon and pattern and re.fullmatch(r"\d+|out(\.\d+)?|[A-Za-z_]\w*", which)):
        raise UsageError(f"--hook {hook!r} is not PATTERN:ARGUMENT; {HOOK_HELP}")
    adapter = _described(which)
    matches = [(path, m) for path, m in model.named_modules() if fnmatchcase(path, pattern)]
    if not matches:
        raise UsageError(f"--hook: no module of {architecture(model)} matches {pattern!r}")
    for path, module in matches:
        yield path, module, adapter


def _described(which: str) -> Adapter:
    """The adapter of a --hook's argument; what follows it are the weights, if the shape agrees."""
    import torch

    def reading(ids: Any, weights: Any) -> Reading:
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
            what = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise SimlabError(f"--hook: {which} is not a tensor of expert ids, but {what}")
        same = isinstance(weights, torch.Tensor) and weights.shape == ids.shape
        return ids, weights if same and weights.is_floating_point() else None

    def of_output(_m: Any, _args: Any, _kwargs: Any, out: Any) -> Reading:
        several = out if isinstance(out, (tuple, list)) else (out,)
        number = int(which[4:] or 0)
        pair = (*several[number : number + 2], None, None)
        return reading(pair[0], pair[1])

    def of_arguments(_m: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> Reading:
        given = [*args, *kwargs.values()]
        if which.isdigit():
            pair = (*given[int(which) : int(which) + 2], None, None)
        elif which in kwargs:
            after = list(kwargs)[list(kwargs).index(which) + 1 :]
            pair = (kwargs[which], kwargs[after[0]] if after else None)
        else:
            place = _place(_m, which)
            pair = (*given[place : place + 2], None, None)
        return reading(pair[0], pair[1])

    if which == "out" or which.startswith("out."):
        return Adapter(of_output, on_output=True)
    return Adapter(of_arguments)


def _place(module: torch.nn.Module, name: str) -> int:
    import inspect

    names = list(inspect.signature(module.forward).parameters)
    if name not in names:
        raise UsageError(
            f"--hook: {type(module).__name__} has no argument {name!r}, only {', '.join(names)}"
        )
    return names.index(name)


def _layer_number(path: str) -> int | None:
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def configs(model: torch.nn.Module) -> list[Any]:
    """The model's configuration and the parts of it that describe text models."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    parts = [config, text, *(getattr(config, n, None) for n in ("ffn_config", "thinker_config"))]
    return [part for part in parts if part is not None]


def _largest(owner: Any, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _n_expert(model: torch.nn.Module, path: str, module: torch.nn.Module) -> int:
    stacked = [len(p) for p in module.parameters(recurse=False) if p.dim() == 3]
    owners = [module, *configs(model)]
    count = _largest(module, _COUNTS[1:2]) or _largest(module, _COUNTS) or min(stacked, default=0)
    count = count or next((n for n in (_largest(o, _COUNTS) for o in owners) if n), 0)
    if not count:
        raise SimlabError(
            f"{architecture(model)}: cannot tell how many experts {path} has; give that module an"
            " attribute num_experts"
        )
    return count


def n_picks(model: torch.nn.Module, sites: list[Site]) -> int:
    """Picks a token and layer as configured (the most over the layers), 0 if nothing tells."""
    owners = [*(site.module for site in sites), *configs(model)]
    return max((_largest(owner, _PICKS) for owner in owners), default=0)
