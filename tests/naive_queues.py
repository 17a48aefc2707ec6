"""Slow, obvious twins of the classic policies that keep lists; hooks as in naive_policies.

Written from the papers. Lists run from the oldest or least recent to the newest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from naive_policies import Lru, Policy, first_absent


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

    def start(self) -> None:
        super().start()
        self.left = 0

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        self.left = int(self.params["uploads"])

    def admit(self, key: int, victim: int) -> bool:
        return self.left > 0

    def on_insert(self, key: int) -> None:
        super().on_insert(key)
        self.left -= 1


QUEUES: dict[str, type[Policy]] = {
    "clock": Clock,
    "sieve": Sieve,
    "slru": Slru,
    "twoq": TwoQ,
    "s3fifo": S3Fifo,
    "lirs": Lirs,
    "w-tinylfu": WTinyLfu,
    "heat-lru": HeatLru,
    "capped-lru": CappedLru,
}
