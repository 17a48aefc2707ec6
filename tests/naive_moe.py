"""Slow, obvious twins of the policies that know layers, steps and routers.

Hooks as in naive_policies; written from what docs/policies.md and the policy files say.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from naive_policies import Mix, Policy, Stale, first_absent


class MixAdmit(Mix):
    """Admits whose value beats the victim's by the margin."""

    defaults = {"margin": 0.1}

    def admit(self, key: int, victim: int) -> bool:
        return victim == -1 or self.value(key) - self.value(victim) >= self.params["margin"]


def mean_log(factors: list[float]) -> float:
    """As the logarithm of a product, eight factors at a time."""
    total = sum(math.log(math.prod(factors[i : i + 8])) for i in range(0, len(factors), 8))
    return total / len(factors)


class MixTr(Mix):
    """Adds the mean log lift that the layer's last set gives a key."""

    half_lives = (2.0, 8.0, 32.0, 128.0)
    defaults = {"lift": 0.7}

    def memory(self) -> float:
        return 0.0

    def start(self) -> None:
        super().start()
        self.previous: list[list[int]] = [[] for _ in range(self.layers)]  # keys of the last set
        self.picks: Counter[int] = Counter()  # visits that picked the key
        self.trace = [0.0] * (self.layers * self.experts)  # what each key vouches with
        self.after: defaultdict[int, float] = defaultdict(float)  # sum of a key's traces
        self.pairs: defaultdict[tuple[int, int], float] = defaultdict(float)  # as 2nd key is picked

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        super().on_set(layer, experts)
        keys = [layer * self.experts + e for e in experts]
        for before in range(layer * self.experts, (layer + 1) * self.experts):
            self.after[before] += self.trace[before]
            for key in keys:
                self.pairs[before, key] += self.trace[before]
            self.trace[before] *= self.memory()
            if self.trace[before] <= 1e-12:
                self.trace[before] = 0.0
        for key in keys:
            self.trace[key] += 1.0
        self.picks.update(keys)
        self.previous[layer] = keys

    def lift(self, key: int) -> float:
        layer = key // self.experts
        if not self.picks[key]:  # sglang: resident from the start
            return 0.0
        rarity = self.visits[layer] / self.picks[key]  # 1 / P(key)
        told = [self.pairs[before, key] * rarity + 8.0 for before in self.previous[layer]]
        chances = [self.after[before] + 8.0 for before in self.previous[layer]]
        return mean_log(told) - mean_log(chances)

    def worth(self, key: int) -> float:
        return super().worth(key) + self.params["lift"] * self.lift(key)


class MixTrace(MixTr):
    """Its picks vouch for later sets too, with a weight that is halved every so many visits."""

    half_lives = (4.0, 16.0, 64.0, 256.0)
    defaults = {"lift": 1.2, "memory": 1.0}

    def memory(self) -> float:
        return 2.0 ** (-1.0 / self.params["memory"])


class LeastStale(Stale):
    """Not used in this step first, then whose layer comes again last, then least recent."""

    def start(self) -> None:
        super().start()
        self.step = 0
        self.used_in: dict[int, int] = {}

    def on_step(self, tokens: int) -> None:
        self.step += 1

    def touch(self, key: int) -> None:
        super().touch(key)
        self.used_in[key] = self.step

    on_hit = touch
    on_insert = touch

    def victim(self, key: int, present: set[int]) -> int:
        def rank(k: int) -> tuple[bool, int, int]:
            return (self.used_in[k] == self.step, -self.distance(k), self.when[k])

        return min(self.candidates(present), key=rank)


class PinnedLru(Policy):
    """Pins the most used keys of each layer every so many tokens; the loose ones leave by LRU."""

    defaults = {"share": 0.5, "interval": 256}

    def start(self) -> None:
        self.uses = [0.0] * (self.layers * self.experts)
        self.pinned: set[int] = set()
        self.tokens = 0
        self.clock = 0
        self.when: dict[int, int] = {}

    def hot(self) -> int:
        """Keys to pin in each layer."""
        return int(self.slots * self.params["share"]) // self.layers

    def repin(self) -> None:
        before = set(self.pinned)
        self.pinned = set()
        for layer in range(self.layers):
            keys = range(layer * self.experts, (layer + 1) * self.experts)
            used = sorted((k for k in keys if self.uses[k] > 0), key=lambda k: (-self.uses[k], k))
            self.pinned.update(used[: self.hot()])
        self.uses = [u / 2 for u in self.uses]
        for key in sorted((before ^ self.pinned) & self.resident):
            self.touch(key)  # it joins the other list at the recent end

    def on_step(self, tokens: int) -> None:
        if self.tokens >= int(self.params["interval"]):
            self.tokens = 0
            self.repin()
        self.tokens += tokens

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            self.uses[layer * self.experts + expert] += 1.0

    def touch(self, key: int) -> None:
        self.clock += 1
        self.when[key] = self.clock

    on_hit = touch
    on_insert = touch

    def victim(self, key: int, present: set[int]) -> int:
        return min(self.candidates(present), key=lambda k: (k in self.pinned, self.when[k]))


class Repin(PinnedLru):
    """Uploads pinned keys only, once there are any."""

    defaults = {"interval": 256, "hot": 0}

    def hot(self) -> int:
        most = self.slots // self.layers
        return min(int(self.params["hot"]), most) or most

    def admit(self, key: int, victim: int) -> bool:
        return victim == -1 or (key in self.pinned and victim not in self.pinned)


class RouterEwma(Policy):
    """The lowest average router weight leaves."""

    defaults = {"half_life": 8.0}

    def start(self) -> None:
        self.average = [0.0] * (self.layers * self.experts)

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        keep = 2.0 ** (-1.0 / self.params["half_life"])
        for expert in range(self.experts):
            key = layer * self.experts + expert
            self.average[key] *= keep
            if expert in experts:
                self.average[key] += (1.0 - keep) * self.weight[key]

    def victim(self, key: int, present: set[int]) -> int:
        return min(self.candidates(present), key=lambda k: (self.average[k], k))


class StaticHot(Policy):
    """The most used keys of the run, and nobody else."""

    def start(self) -> None:
        self.arrived: list[int] = []

    def on_insert(self, key: int) -> None:
        self.arrived.append(key)

    def on_evict(self, key: int) -> None:
        self.arrived.remove(key)

    def victim(self, key: int, present: set[int]) -> int:
        found = first_absent(self.arrived, present)
        assert found is not None
        return found

    def admit(self, key: int, victim: int) -> bool:
        most_used = sorted(self.uses_of_run, key=lambda k: (-self.uses_of_run[k], k))
        return victim == -1 and key in most_used[: self.slots]


MOE: dict[str, type[Policy]] = {
    "mix-admit": MixAdmit,
    "mix-tr": MixTr,
    "mix-trace": MixTrace,
    "least-stale": LeastStale,
    "pinned-lru": PinnedLru,
    "repin": Repin,
    "router-ewma": RouterEwma,
    "static-hot": StaticHot,
}
