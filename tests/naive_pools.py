"""Slow twins of the pools: slots, the bypassing bound, and bytes. Layers are indices in a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

from naive_policies import Policy


class Served(NamedTuple):
    """What became of an access set: experts that were resident, and that were uploaded."""

    hits: set[int]
    uploaded: set[int]
    runs: int


class SlotPool:
    """Slots of one group under a policy."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self.policy, self.slots = policy, slots
        self.slot_of: dict[int, int] = {}

    def serve(self, layer: int, experts: list[int], next_uses: Mapping[int, int]) -> Served:
        """Serve one access set of the group's ``layer``; next_uses are those of its keys."""
        policy, n_expert = self.policy, self.policy.experts
        present = {layer * n_expert + e for e in experts}
        policy.next_use.update(next_uses)
        policy.on_set(layer, experts)
        hits = [e for e in experts if layer * n_expert + e in self.slot_of]
        for expert in hits:
            policy.on_hit(layer * n_expert + expert)
        fills: list[tuple[int, int]] = []
        for expert in sorted(set(experts) - set(hits)):
            key = layer * n_expert + expert
            policy.on_miss(key)
            victim = -1
            if len(self.slot_of) == self.slots:
                victim = policy.victim(key, present)
                assert victim in self.slot_of and not (policy.protects and victim in present)
            if not policy.admit(key, victim):
                continue
            # slots fill in index order
            taken = set(self.slot_of.values())
            slot = next(i for i in range(self.slots + 1) if i not in taken)
            if victim != -1:
                slot = self.slot_of.pop(victim)
                policy.resident.remove(victim)
                policy.on_evict(victim)
            self.slot_of[key] = slot
            policy.resident.add(key)
            policy.on_insert(key)
            fills.append((expert, slot))
        assert len(self.slot_of) <= self.slots
        merged = sum(a[0] + 1 == b[0] and a[1] + 1 == b[1] for a, b in pairwise(fills))
        return Served(set(hits), {expert for expert, _ in fills}, len(fills) - merged)

    def resize(self, slots: int) -> None:
        """Between two steps: the policy names who leaves, who stays keeps to the first slots."""
        while len(self.slot_of) > slots:
            victim = self.policy.victim(-1, set())
            del self.slot_of[victim]
            self.policy.resident.remove(victim)
            self.policy.on_evict(victim)
        for key in sorted(self.slot_of, key=self.slot_of.__getitem__):
            if self.slot_of[key] >= slots:
                free = set(range(slots)) - set(self.slot_of.values())
                self.slot_of[key] = min(free)
        self.slots = slots


class BypassPool(SlotPool):
    """The bound ``opt-bypass``: the nearest next uses of (cache and set) stay, whoever they are.

    One miss at a time, as an upload is counted when it happens; what stays is checked against the
    definition, which looks at the whole set at once.
    """

    def serve(self, layer: int, experts: list[int], next_uses: Mapping[int, int]) -> Served:
        uses = {**self.policy.next_use, **next_uses}
        union = set(self.slot_of) | {layer * self.policy.experts + e for e in experts}
        served = super().serve(layer, experts, next_uses)
        assert set(self.slot_of) == set(sorted(union, key=uses.__getitem__)[: self.slots])
        return served


class WavePool(SlotPool):
    """SGLang's table of one layer: full from the start, larger sets served in waves."""

    def __init__(self, policy: Policy, slots: int, next_uses: Mapping[int, int]) -> None:
        super().__init__(policy, slots)
        policy.next_use.update(next_uses)
        for expert in range(min(slots, policy.experts)):
            self.slot_of[expert] = expert
            policy.resident.add(expert)
            policy.on_insert(expert)

    def serve(self, layer: int, experts: list[int], next_uses: Mapping[int, int]) -> Served:
        assert layer == 0
        hits = [e for e in experts if e in self.slot_of]
        line = hits + sorted(set(experts) - set(hits))
        waves = [line[i : i + self.slots] for i in range(0, len(line), self.slots)]
        if len(waves) == 1:
            waves = [experts]  # in first-seen order, as everywhere
        uploaded: set[int] = set()
        for wave in waves:
            uploaded |= super().serve(0, wave, next_uses).uploaded
        return Served(set(hits), uploaded, len(uploaded))


class BytePool(SlotPool):
    """All layers in one pool with a budget in bytes: insert the misses first, then evict."""

    def __init__(self, policy: Policy, budget: int, bytes_of: Callable[[int], int]) -> None:
        super().__init__(policy, 0)
        self.budget, self.bytes_of = budget, bytes_of
        self.used = self.peak = 0

    def serve(self, layer: int, experts: list[int], next_uses: Mapping[int, int]) -> Served:
        policy, n_expert = self.policy, self.policy.experts
        present = {layer * n_expert + e for e in experts}
        policy.next_use.update(next_uses)
        policy.on_set(layer, experts)
        hits: set[int] = set()
        for expert in experts:
            key = layer * n_expert + expert
            if key in self.slot_of:
                hits.add(expert)
                policy.on_hit(key)
            else:
                policy.on_miss(key)
                self.slot_of[key] = 0
                self.used += self.bytes_of(key)
                policy.resident.add(key)
                policy.on_insert(key)
        self.peak = max(self.peak, self.used)
        while self.used > self.budget and not policy.resident <= present:
            victim = policy.victim(-1, present)
            assert victim in self.slot_of and victim not in present
            del self.slot_of[victim]
            self.used -= self.bytes_of(victim)
            policy.resident.remove(victim)
            policy.on_evict(victim)
        # a pool of bytes has no slots in which uploads could lie side by side
        return Served(hits, set(experts) - hits, len(set(experts) - hits))
