"""Slow, obvious twins of the classic policies that keep scores; hooks as in naive_policies.

Written from the papers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from naive_policies import Lfu, Lru, Policy, Random


class LruK(Policy):
    """O'Neil et al. 1993: all uses of all keys, one list a key."""

    defaults = {"k": 2}

    def start(self) -> None:
        self.uses: dict[int, list[int]] = defaultdict(list)
        self.clock = 0

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            self.clock += 1
            self.uses[layer * self.experts + expert].append(self.clock)

    def victim(self, key: int, present: set[int]) -> int:
        wanted = int(self.params["k"])

        def rank(k: int) -> tuple[bool, int, int]:
            uses = self.uses[k] or [0]  # sglang: resident from the start
            return (True, uses[-wanted], k) if len(uses) >= wanted else (False, uses[-1], k)

        return min(self.candidates(present), key=rank)


class LfuDa(Policy):
    """Arlitt et al. 1999: K = F + L, L the key value of the last one evicted."""

    def start(self) -> None:
        self.inflation = 0.0
        self.freq: dict[int, int] = {}
        self.value: dict[int, float] = {}

    def gain(self, key: int) -> float:
        return 1.0

    def on_insert(self, key: int) -> None:
        self.freq[key] = 0
        self.on_hit(key)

    def on_hit(self, key: int) -> None:
        self.freq[key] += 1
        self.value[key] = self.inflation + self.freq[key] * self.gain(key)

    def on_evict(self, key: int) -> None:
        self.inflation = self.value[key]

    def victim(self, key: int, present: set[int]) -> int:
        return min(self.candidates(present), key=lambda k: (self.value[k], k))


class Gdsf(LfuDa):
    """Cherkasova 1998: K = F * C / S + L with C = 1 and S in mean expert sizes."""

    def gain(self, key: int) -> float:
        mean = sum(self.layer_bytes) / len(self.layer_bytes)
        return mean / self.layer_bytes[key // self.experts]


class Lrfu(Policy):
    """Lee et al. 2001: C = 1 + C * F(time since the last use), F(x) = 2^(-x / half_life).

    Compared at one moment: ln C at the last use, faded since, which puts the same number on both
    sides; the times of all uses are kept and C is worked out anew.
    """

    defaults = {"half_life": 16.0}

    def start(self) -> None:
        self.now = 0
        self.times: dict[int, list[int]] = defaultdict(list)

    def on_step(self, tokens: int) -> None:
        self.now += tokens

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            self.times[layer * self.experts + expert].append(self.now)

    def rank(self, key: int) -> float:
        rate = math.log(2.0) / self.params["half_life"]
        c, last = 0.0, 0
        for time in self.times[key]:
            c = 1.0 + c * math.exp((last - time) * rate)
            last = time
        return math.log(c) + last * rate if c else -math.inf

    def victim(self, key: int, present: set[int]) -> int:
        return min(self.candidates(present), key=lambda k: (self.rank(k), k))


class LrfuAdmit(Lrfu):
    defaults = {"half_life": 16.0, "margin": 0.1}

    def admit(self, key: int, victim: int) -> bool:
        return victim == -1 or self.rank(key) >= self.rank(victim) + self.params["margin"]


class Hyperbolic(Random):
    """Blankstein et al. 2017: n_i / t_i over a sample drawn with replacement."""

    defaults = {"sample": 64}

    def start(self) -> None:
        super().start()
        self.now = 0
        self.n: dict[int, int] = {}
        self.entered: dict[int, int] = {}

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        self.now += len(experts)

    def on_hit(self, key: int) -> None:
        self.n[key] += 1

    def on_insert(self, key: int) -> None:
        super().on_insert(key)
        self.n[key], self.entered[key] = 1, self.now

    def victim(self, key: int, present: set[int]) -> int:
        sample = [super().victim(key, present)]
        while len(sample) < self.params["sample"]:
            sample.append(super().victim(key, present))
        return min(sample, key=lambda k: self.n[k] / (self.now - self.entered[k]))


class LeCaR(Policy):
    """Vietri et al. 2018, algorithms 1 and 2, on the twins of LRU and LFU."""

    defaults = {"learning_rate": 0.45, "history": 0.5}

    def start(self) -> None:
        self.lru = Lru(self.layers, self.experts, self.slots)
        self.lfu = Lfu(self.layers, self.experts, self.slots)
        self.dice = Random(self.layers, self.experts, self.slots, self.seed)
        self.weights = [0.5, 0.5]
        self.histories: list[list[int]] = [[], []]
        self.evicted_at: dict[int, int] = {}
        self.room = int(self.slots * self.params["history"])
        self.time = 0
        self.by = 0

    def on_hit(self, key: int) -> None:
        self.time += 1
        self.lru.on_hit(key)
        self.lfu.on_hit(key)

    def on_miss(self, key: int) -> None:
        self.time += 1
        for culprit, history in enumerate(self.histories):
            if key in history:
                history.remove(key)
                waited = self.time - self.evicted_at[key]
                regret = math.exp(waited * (math.log(0.005) / max(self.slots, 1)))
                self.weights[1 - culprit] *= math.exp(self.params["learning_rate"] * regret)
                lru = self.weights[0] / (self.weights[0] + self.weights[1])
                self.weights = [lru, 1.0 - lru]
                return

    def victim(self, key: int, present: set[int]) -> int:
        self.lfu.resident = self.resident
        self.by = 0 if (self.dice.draw() >> 11) / 2**53 < self.weights[0] else 1
        return (self.lru, self.lfu)[self.by].victim(key, present)

    def on_evict(self, key: int) -> None:
        self.lru.on_evict(key)
        self.lfu.on_evict(key)
        self.evicted_at[key] = self.time
        history = self.histories[self.by]
        history.append(key)
        del history[: max(0, len(history) - self.room)]

    def on_insert(self, key: int) -> None:
        self.lru.on_insert(key)
        self.lfu.on_insert(key)


class LayerLru(Policy):
    """Recency per layer; a quota of slots per layer."""

    def start(self) -> None:
        self.clock = 0
        self.touched: dict[int, int] = {}

    def touch(self, key: int) -> None:
        self.clock += 1
        self.touched[key] = self.clock

    on_hit = touch
    on_insert = touch

    def rank(self, key: int) -> tuple[float, int]:
        """Who leaves first within a layer."""
        return (self.touched[key], key)

    def victim(self, key: int, present: set[int]) -> int:
        def quota(layer: int) -> int:
            return self.slots // self.layers + (layer < self.slots % self.layers)

        def members(layer: int, keys: set[int]) -> list[int]:
            return [k for k in keys if k // self.experts == layer]

        def over(layer: int) -> int:
            return len(members(layer, self.resident)) - quota(layer)

        free = self.candidates(present)
        own = key // self.experts
        if key >= 0 and over(own) >= 0 and members(own, free):
            return min(members(own, free), key=self.rank)
        able = [layer for layer in range(self.layers) if members(layer, free)]
        return min(members(max(able, key=over), free), key=self.rank)


class LayerLrfu(LayerLru):
    defaults = {"half_life": 16.0}

    def start(self) -> None:
        super().start()
        self.lrfu = Lrfu(self.layers, self.experts, self.slots, params=self.params)
        self.on_step = self.lrfu.on_step  # type: ignore[method-assign]
        self.on_set = self.lrfu.on_set  # type: ignore[method-assign]

    def rank(self, key: int) -> tuple[float, int]:
        return (self.lrfu.rank(key), key)


SCORES: dict[str, type[Policy]] = {
    "lru-k": LruK,
    "lfu-da": LfuDa,
    "gdsf": Gdsf,
    "lrfu": Lrfu,
    "lrfu-admit": LrfuAdmit,
    "hyperbolic": Hyperbolic,
    "lecar": LeCaR,
    "layer-lru": LayerLru,
    "layer-lrfu": LayerLrfu,
}
