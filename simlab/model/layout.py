"""What the experts are: layers, the groups they form, and the bytes of one expert.

llama.cpp puts layers whose expert tensors agree in type and shape into one group, and each group
has one pool of slots (article 002; src/llama-moe-cache.cpp). A trace knows the bytes of its experts
per layer; layers with equal bytes form a group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from simlab.trace.schema import TraceMeta


@dataclass(frozen=True)
class ExpertGroup:
    """Layers that share one pool.

    Attributes:
        layers: the model's layer numbers, ascending.
        tensor_bytes: bytes of one expert in each of its tensors, or empty when unknown.
    """

    layers: tuple[int, ...]
    tensor_bytes: tuple[int, ...]

    @property
    def expert_bytes(self) -> int | None:
        """Bytes of one expert over all its tensors; None when unknown."""
        return sum(self.tensor_bytes) if self.tensor_bytes else None


@dataclass(frozen=True)
class ExpertLayout:
    """Groups in the order of their first layers, and the experts of a layer."""

    n_expert: int
    k: int
    groups: tuple[ExpertGroup, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """All MoE layers, ascending."""
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


def layout_of(meta: TraceMeta) -> ExpertLayout:
    """The layout that a trace's metadata describes."""
    return group_layers(meta.n_expert, meta.k, meta.moe_layers, meta.expert_bytes)
