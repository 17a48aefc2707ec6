"""What the experts are: layers, the groups they form, and the bytes of one expert.

llama.cpp puts layers whose expert tensors agree in type and shape into one group, and each group
has one pool of slots (article 002; src/llama-moe-cache.cpp). A trace knows the bytes of its experts
per layer; layers with equal bytes form a group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simlab.errors import UsageError

if TYPE_CHECKING:  # planning a model needs no trace, and starts without numpy
    from simlab.trace.schema import TraceMeta


@dataclass(frozen=True)
class ExpertGroup:
    """Layers that share one pool.

    Attributes:
        layers: the model's layer numbers, ascending.
        tensor_bytes: bytes of one expert in each of its tensors, or empty when unknown.
        types: GGML types of those tensors, or empty when unknown.
        device: which of several devices holds the pool, counted from 0.
    """

    layers: tuple[int, ...]
    tensor_bytes: tuple[int, ...]
    types: tuple[str, ...] = ()
    device: int = 0

    @property
    def expert_bytes(self) -> int | None:
        """Bytes of one expert over all its tensors; None when unknown."""
        return sum(self.tensor_bytes) if self.tensor_bytes else None


@dataclass(frozen=True)
class ExpertLayout:
    """Groups in the order of their first layers, and the experts of a layer.

    Attributes:
        n_expert: routed experts of a layer. k: picks of a token in a layer.
        groups: of the layers whose experts are in host memory.
        resident: layers whose experts stay on the device, ascending: no pool serves them.
    """

    n_expert: int
    k: int
    groups: tuple[ExpertGroup, ...]
    resident: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers that a pool serves, ascending."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    @property
    def n_keys(self) -> int:
        """(layer, expert) pairs over all groups."""
        return len(self.layers) * self.n_expert

    def keys_of(self, group: int) -> int:
        """(layer, expert) pairs of one group: the most slots its pool can use."""
        return len(self.groups[group].layers) * self.n_expert

    @property
    def hash(self) -> str:
        """Identity of the layout, printed in every result."""
        body = [self.n_expert, self.k, [[g.layers, g.tensor_bytes] for g in self.groups]]
        if self.resident:
            body.append(self.resident)
        return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]


def group_layers(
    n_expert: int, k: int, layers: Sequence[int], tensor_bytes: Sequence[Sequence[int]]
) -> ExpertLayout:
    """Group layers by the bytes of their expert tensors.

    Args:
        layers: MoE layer numbers, ascending.
        tensor_bytes: per layer the bytes of one expert per tensor; empty when unknown, then all
            layers form one group.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, layer in enumerate(layers):
        size = tuple(tensor_bytes[index]) if tensor_bytes else ()
        members.setdefault(size, []).append(layer)
    groups = tuple(ExpertGroup(tuple(found), size) for size, found in members.items())
    return ExpertLayout(n_expert=n_expert, k=k, groups=groups)


def one_pool_a_layer(layout: ExpertLayout) -> ExpertLayout:
    """The layout with each layer as a group of its own, as SGLang has it."""
    groups = (replace(g, layers=(layer,)) for g in layout.groups for layer in g.layers)
    return replace(layout, groups=tuple(sorted(groups, key=lambda group: group.layers)))


def layout_of(meta: TraceMeta) -> ExpertLayout:
    """The layout that a trace's metadata describes."""
    return group_layers(meta.n_expert, meta.k, meta.moe_layers, meta.expert_bytes)


def fit_to_layout(meta: TraceMeta, layout: ExpertLayout) -> TraceMeta:
    """The metadata that a trace has when it is replayed with another layout's groups and bytes.

    The layers that the layout keeps on the device are gone from it: drop their rows.

    Raises:
        UsageError: the trace is of another shape; says in what.
    """
    wrong = []
    if meta.n_expert != layout.n_expert:
        wrong.append(f"{meta.n_expert} experts a layer, the layout has {layout.n_expert}")
    if meta.k != layout.k:
        wrong.append(f"k = {meta.k}, the layout has k = {layout.k}")
    known = {*layout.layers, *layout.resident}
    strange = sorted(set(meta.moe_layers) - known)
    missing = sorted(known - set(meta.moe_layers))
    if strange:
        wrong.append(f"MoE layers {spans(strange)}, which the layout lacks")
    if missing:
        wrong.append(f"no MoE layers {spans(missing)}, which the layout has")
    if wrong:
        raise UsageError(f"the trace does not fit the layout: it has {'; '.join(wrong)}")
    return replace(meta, moe_layers=layout.layers, expert_bytes=())


def spans(layers: Sequence[int]) -> str:
    """Ascending layer numbers as people write them: ``0-5,8,11``."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
