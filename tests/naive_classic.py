"""Slow, obvious twins of the classic policies, written from the papers; hooks as in naive_policies.

Lists run from the oldest or least recent to the newest unless said otherwise.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from naive_policies import Lfu, Lru, Policy, Random, first_absent


def must(key: int | None) -> int:
    """There is always somebody to evict."""
    assert key is not None
    return key


class Clock(Policy):
    """Corbató 1968: the hand is before the first of the ring."""

    def start(self) -> None:
        self.ring: deque[int] = deque()
        self.bit: dict[int, bool] = {}

    def on_hit(self, key: int) -> None:
        self.bit[key] = True

    def on_insert(self, key: int) -> None:
        self.ring.append(key)
        self.bit[key] = False

    def on_evict(self, key: int) -> None:
        self.ring.remove(key)

    def victim(self, key: int, present: set[int]) -> int:
        while self.ring[0] in present or self.bit[self.ring[0]]:
            if self.ring[0] not in present:
                self.bit[self.ring[0]] = False
            self.ring.rotate(-1)
        return self.ring[0]


class Sieve(Policy):
    """Zhang et al. 2024: keys never move; the hand is an index into the arrivals."""

    def start(self) -> None:
        self.arrivals: list[int] = []
        self.visited: set[int] = set()
        self.hand = 0

    def on_hit(self, key: int) -> None:
        self.visited.add(key)

    def on_insert(self, key: int) -> None:
        if self.hand == len(self.arrivals):  # past the newest means at the oldest, not at this one
            self.hand = 0
        self.arrivals.append(key)

    def on_evict(self, key: int) -> None:
        place = self.arrivals.index(key)
        self.hand -= place < self.hand
        del self.arrivals[place]
        self.visited.discard(key)

    def victim(self, key: int, present: set[int]) -> int:
        while True:
            self.hand %= len(self.arrivals)
            looked_at = self.arrivals[self.hand]
            if looked_at not in present:
                if looked_at not in self.visited:
                    return looked_at
                self.visited.remove(looked_at)
            self.hand += 1


class Slru(Policy):
    """Karedla et al. 1994."""

    defaults = {"protected": 0.8}

    def start(self) -> None:
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.room = int(self.slots * self.params["protected"])

    def on_hit(self, key: int) -> None:
        (self.probation if key in self.probation else self.protected).remove(key)
        self.protected.append(key)
        if len(self.protected) > self.room:
            self.probation.append(self.protected.pop(0))

    def on_insert(self, key: int) -> None:
        self.probation.append(key)

    def on_evict(self, key: int) -> None:
        (self.probation if key in self.probation else self.protected).remove(key)

    def victim(self, key: int, present: set[int]) -> int:
        return must(first_absent([*self.probation, *self.protected], present))


class TwoQ(Policy):
    """Johnson & Shasha 1994, full version: reclaimfor() evicts before the ghost is taken up."""

    defaults = {"in_share": 0.25, "out_share": 0.5}

    def start(self) -> None:
        self.a1in: list[int] = []
        self.a1out: list[int] = []
        self.am: list[int] = []
        self.kin = int(self.slots * self.params["in_share"])
        self.kout = int(self.slots * self.params["out_share"])
        self.was_out = False

    def on_hit(self, key: int) -> None:
        if key in self.am:
            self.am.remove(key)
            self.am.append(key)

    def on_miss(self, key: int) -> None:
        self.was_out = key in self.a1out

    def victim(self, key: int, present: set[int]) -> int:
        order = [*self.am, *self.a1in]
        if len(self.a1in) > self.kin:
            order = [*self.a1in, *self.am]
        return must(first_absent(order, present))

    def on_evict(self, key: int) -> None:
        if key in self.am:
            self.am.remove(key)
            return
        self.a1in.remove(key)
        self.a1out.append(key)
        del self.a1out[: max(0, len(self.a1out) - self.kout)]

    def on_insert(self, key: int) -> None:
        if self.was_out:
            if key in self.a1out:
                self.a1out.remove(key)
            self.am.append(key)
        else:
            self.a1in.append(key)


class S3Fifo(Policy):
    """Yang et al. 2023; while nothing was evicted a full small queue sends newcomers to main."""

    defaults = {"small": 0.1, "ghost": 0.9}

    def start(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.freq: dict[int, int] = {}
        self.small_size = max(1, int(self.slots * self.params["small"]))
        self.ghost_size = int(self.slots * self.params["ghost"])
        self.has_evicted = False
        self.in_ghost = False

    def on_hit(self, key: int) -> None:
        self.freq[key] += 1

    def on_miss(self, key: int) -> None:
        self.in_ghost = key in self.ghost
        if self.in_ghost:
            self.ghost.remove(key)

    def evict_small(self, present: set[int]) -> int | None:
        for key in [k for k in self.small if k not in present]:
            if self.freq[key] < 2:
                return key
            self.small.remove(key)
            self.main.append(key)
            self.freq[key] = 0
        return None

    def evict_main(self, present: set[int]) -> int | None:
        while True:
            key = first_absent(self.main, present)
            if key is None or self.freq[key] == 0:
                return key
            self.freq[key] = min(self.freq[key], 3) - 1
            self.main.remove(key)
            self.main.append(key)

    def victim(self, key: int, present: set[int]) -> int:
        self.has_evicted = True
        found = None
        if len(self.main) > self.slots - self.small_size or not self.small:
            found = self.evict_main(present)
        if found is None:
            found = self.evict_small(present)
        if found is None:
            found = self.evict_main(present)
        return must(found)

    def on_evict(self, key: int) -> None:
        if key in self.main:
            self.main.remove(key)
            return
        self.small.remove(key)
        self.ghost.append(key)
        del self.ghost[: max(0, len(self.ghost) - self.ghost_size)]

    def on_insert(self, key: int) -> None:
        self.freq[key] = 0
        full = not self.has_evicted and len(self.small) >= self.small_size
        (self.main if self.in_ghost or full else self.small).append(key)


class Lirs(Policy):
    """Jiang & Zhang 2002. Stack S is not kept: a key is in S if it was used more recently than the
    least recent LIR key.
    """

    defaults = {"hir": 0.01}

    def start(self) -> None:
        hir = min(self.slots, max(self.k, int(self.slots * self.params["hir"])))
        self.lir_room = self.slots - hir
        self.lir: set[int] = set()
        self.queue: list[int] = []
        self.last_use: dict[int, int] = {}
        self.clock = 0

    def in_stack(self, key: int) -> bool:
        if key not in self.last_use or not self.lir:
            return False
        return self.last_use[key] > min(self.last_use[k] for k in self.lir)

    def use(self, key: int) -> None:
        self.clock += 1
        self.last_use[key] = self.clock

    def become_lir(self, key: int) -> None:
        self.use(key)
        self.lir.add(key)
        if key in self.queue:
            self.queue.remove(key)
        if len(self.lir) > self.lir_room:
            bottom = min(self.lir, key=self.last_use.__getitem__)
            self.lir.remove(bottom)
            self.queue.append(bottom)

    def use_hir(self, key: int) -> None:
        if self.in_stack(key):
            self.become_lir(key)
        else:
            self.use(key)
            if key in self.queue:
                self.queue.remove(key)
            self.queue.append(key)

    def on_hit(self, key: int) -> None:
        if key in self.lir:
            self.use(key)
        else:
            self.use_hir(key)

    def victim(self, key: int, present: set[int]) -> int:
        found = first_absent(self.queue, present)
        if found is not None:
            return found
        return min(self.lir - present, key=self.last_use.__getitem__)

    def on_evict(self, key: int) -> None:
        if key in self.lir:
            self.lir.remove(key)
        else:
            self.queue.remove(key)

    def on_insert(self, key: int) -> None:
        if len(self.lir) < self.lir_room:
            self.become_lir(key)
        else:
            self.use_hir(key)


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

        def rank(k: int) -> tuple[bool, int]:
            uses = self.uses[k]
            return (True, uses[-wanted]) if len(uses) >= wanted else (False, uses[-1])

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
        return math.log(c) + last * rate

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


class WTinyLfu(Policy):
    """Einziger et al. 2017 with exact counters instead of a sketch."""

    defaults = {"window": 0.01, "protected": 0.8}

    def start(self) -> None:
        self.window_room = max(1, int(self.slots * self.params["window"]))
        self.main_room = self.slots - self.window_room
        self.protected_room = int(self.main_room * self.params["protected"])
        self.window: list[int] = []
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.freq = [0] * (self.layers * self.experts)
        self.additions = 0

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            key = layer * self.experts + expert
            self.freq[key] = min(15, self.freq[key] + 1)
            self.additions += 1
        if self.additions >= 10 * self.slots:
            self.additions //= 2
            self.freq = [f // 2 for f in self.freq]

    def where(self, key: int) -> list[int]:
        return next(q for q in (self.window, self.probation, self.protected) if key in q)

    def on_hit(self, key: int) -> None:
        if key in self.window:
            self.window.remove(key)
            self.window.append(key)
            return
        self.where(key).remove(key)
        self.protected.append(key)
        if len(self.protected) > self.protected_room:
            self.probation.append(self.protected.pop(0))

    def victim(self, key: int, present: set[int]) -> int:
        candidate = first_absent(self.window, present)
        main = first_absent([*self.probation, *self.protected], present)
        if candidate is None:
            return must(main)
        if main is not None and self.freq[candidate] > self.freq[main]:
            return main
        return candidate

    def on_evict(self, key: int) -> None:
        self.where(key).remove(key)

    def on_insert(self, key: int) -> None:
        self.window.append(key)
        while (
            len(self.window) > self.window_room
            and len(self.probation) + len(self.protected) < self.main_room
        ):
            self.probation.append(self.window.pop(0))


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


class HeatLru(Lru):
    """A key used more than n times is spared once, and counts anew."""

    defaults = {"uses": 2}

    def start(self) -> None:
        super().start()
        self.used: dict[int, int] = {}

    def on_hit(self, key: int) -> None:
        super().on_hit(key)
        self.used[key] += 1

    def on_insert(self, key: int) -> None:
        super().on_insert(key)
        self.used[key] = 1

    def victim(self, key: int, present: set[int]) -> int:
        while True:
            found = super().victim(key, present)
            if self.used[found] <= self.params["uses"]:
                return found
            self.used[found] = 0
            self.order.move_to_end(found)


class CappedLru(Lru):
    """So many uploads for one access set, the rest declined."""

    defaults = {"uploads": 2}

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        self.left = int(self.params["uploads"])

    def admit(self, key: int, victim: int) -> bool:
        return self.left > 0

    def on_insert(self, key: int) -> None:
        super().on_insert(key)
        self.left -= 1


CLASSIC: dict[str, type[Policy]] = {
    "clock": Clock,
    "sieve": Sieve,
    "slru": Slru,
    "twoq": TwoQ,
    "s3fifo": S3Fifo,
    "lirs": Lirs,
    "lru-k": LruK,
    "lfu-da": LfuDa,
    "gdsf": Gdsf,
    "lrfu": Lrfu,
    "lrfu-admit": LrfuAdmit,
    "hyperbolic": Hyperbolic,
    "lecar": LeCaR,
    "w-tinylfu": WTinyLfu,
    "layer-lru": LayerLru,
    "layer-lrfu": LayerLrfu,
    "heat-lru": HeatLru,
    "capped-lru": CappedLru,
}
