"""Slow, obvious twins of the policies: dicts, lists and sets, one class a policy.

A key is layer_in_group * experts + expert. The hooks are those of simlab.policy.protocol; a victim
is asked for with the set of resident keys and the set of present ones, which may not leave.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

MASK = 2**64 - 1


class Policy:
    """Does nothing; a policy overrides the hooks that it needs.

    ``resident`` is the pool's own set of resident keys and ``next_use`` maps a key to the position
    of its next lookup (kept by the pool, for the bounds only). ``weight`` maps a present key to its
    router weight, ``uses_of_run`` every key to its lookups in the whole run, ``layer_bytes`` holds
    the bytes of one expert of each layer.
    """

    protects = True  # the present set; a bound may do without
    defaults: Mapping[str, float] = {}

    def __init__(
        self,
        layers: int,
        experts: int,
        slots: int,
        seed: int = 0,
        k: int = 1,
        params: Mapping[str, float] | None = None,
    ) -> None:
        self.layers, self.experts, self.slots, self.seed = layers, experts, slots, seed
        self.k = k
        self.params = {**self.defaults, **(params or {})}
        self.weight: dict[int, float] = {}
        self.uses_of_run: Mapping[int, int] = {}
        self.layer_bytes: Sequence[int] = [1] * layers
        self.resident: set[int] = set()
        self.next_use: dict[int, int] = {}
        self.start()

    def start(self) -> None: ...
    def on_step(self, tokens: int) -> None: ...
    def on_set(self, layer: int, experts: Sequence[int]) -> None: ...
    def on_hit(self, key: int) -> None: ...
    def on_miss(self, key: int) -> None: ...
    def on_evict(self, key: int) -> None: ...
    def on_insert(self, key: int) -> None: ...

    def victim(self, key: int, present: set[int]) -> int:
        raise LookupError(f"{type(self).__name__} has nobody to evict for {key} beside {present}")

    def admit(self, key: int, victim: int) -> bool:
        return True

    def candidates(self, present: set[int]) -> set[int]:
        """Resident keys outside the present set."""
        return self.resident - present


def first_absent(keys: Iterable[int], present: set[int]) -> int | None:
    """The first of ``keys`` that is not present."""
    return next((k for k in keys if k not in present), None)


class Lru(Policy):
    def start(self) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def on_hit(self, key: int) -> None:
        self.order.move_to_end(key)

    def on_insert(self, key: int) -> None:
        self.order[key] = None

    def on_evict(self, key: int) -> None:
        del self.order[key]

    def victim(self, key: int, present: set[int]) -> int:
        found = first_absent(self.order, present)
        assert found is not None
        return found


class Fifo(Lru):
    def on_hit(self, key: int) -> None: ...


class Lfu(Policy):
    """Frequency since insertion; the least recent arrival at the lowest frequency leaves."""

    def start(self) -> None:
        self.freq: dict[int, int] = {}
        self.arrived: dict[int, int] = {}
        self.clock = 0

    def on_insert(self, key: int) -> None:
        self.clock += 1
        self.freq[key], self.arrived[key] = 1, self.clock

    def on_hit(self, key: int) -> None:
        self.clock += 1
        self.freq[key] += 1
        self.arrived[key] = self.clock

    def on_evict(self, key: int) -> None:
        del self.freq[key], self.arrived[key]

    def victim(self, key: int, present: set[int]) -> int:
        return min(self.candidates(present), key=lambda k: (self.freq[k], self.arrived[k]))


class LfuDecay(Policy):
    """Decayed frequency of all keys, kept for ever; admits who scores no less than the victim."""

    defaults = {"half_life": 256.0}

    def start(self) -> None:
        self.score = [0.0] * (self.layers * self.experts)
        self.steps = 0

    def on_step(self, tokens: int) -> None:
        self.steps += 1
        if self.steps > 1:
            factor = math.pow(2.0, -tokens / self.params["half_life"])
            self.score = [s * factor for s in self.score]

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            self.score[layer * self.experts + expert] += 1.0

    def victim(self, key: int, present: set[int]) -> int:
        return min(self.candidates(present), key=lambda k: (self.score[k], k))

    def admit(self, key: int, victim: int) -> bool:
        return victim == -1 or self.score[key] >= self.score[victim]


class Arc(Policy):
    """Megiddo & Modha 2003 with a floating target; least recent first in every list."""

    def start(self) -> None:
        self.p = 0.0
        self.t1: OrderedDict[int, None] = OrderedDict()
        self.t2: OrderedDict[int, None] = OrderedDict()
        self.b1: OrderedDict[int, None] = OrderedDict()
        self.b2: OrderedDict[int, None] = OrderedDict()

    def on_hit(self, key: int) -> None:
        self.t1.pop(key, None)
        self.t2.pop(key, None)
        self.t2[key] = None

    def on_miss(self, key: int) -> None:
        if key in self.b1:
            self.p = min(float(self.slots), self.p + max(1.0, len(self.b2) / len(self.b1)))
        elif key in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))

    def victim(self, key: int, present: set[int]) -> int:
        n = len(self.t1)
        from_t1 = n >= 1 and (n > self.p or (key in self.b2 and n == self.p))
        lists = (self.t1, self.t2) if from_t1 else (self.t2, self.t1)
        found = first_absent([*lists[0], *lists[1]], present)
        assert found is not None
        return found

    def on_evict(self, key: int) -> None:
        if key in self.t1:
            del self.t1[key]
            self.b1[key] = None
        else:
            del self.t2[key]
            self.b2[key] = None

    def on_insert(self, key: int) -> None:
        if key in self.b1 or key in self.b2:
            self.b1.pop(key, None)
            self.b2.pop(key, None)
            self.t2[key] = None
        else:
            self.t1[key] = None
        while len(self.t1) + len(self.b1) > self.slots and self.b1:
            self.b1.popitem(last=False)
        lists = (self.t1, self.t2, self.b1, self.b2)
        while sum(map(len, lists)) > 2 * self.slots and self.b2:
            self.b2.popitem(last=False)


class Random(Policy):
    """splitmix64 over the residents, listed by insertion; the last one moves into a hole."""

    def start(self) -> None:
        self.x = self.seed & MASK
        self.keys: list[int] = []

    def draw(self) -> int:
        self.x = (self.x + 0x9E3779B97F4A7C15) & MASK
        z = self.x
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def on_insert(self, key: int) -> None:
        self.keys.append(key)

    def on_evict(self, key: int) -> None:
        hole = self.keys.index(key)
        last = self.keys.pop()
        if last != key:
            self.keys[hole] = last

    def victim(self, key: int, present: set[int]) -> int:
        while True:
            found = self.keys[self.draw() % len(self.keys)]
            if found not in present:
                return found


class Stale(Policy):
    """Most missed visits of its own layer first, then the layer that comes again last."""

    def start(self) -> None:
        self.visits = [0] * self.layers
        self.current = 0
        self.clock = 0
        self.touched: dict[int, int] = {}  # visits of its layer at the last touch
        self.when: dict[int, int] = {}

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        self.visits[layer] += 1
        self.current = layer

    def touch(self, key: int) -> None:
        self.clock += 1
        self.touched[key] = self.visits[key // self.experts]
        self.when[key] = self.clock

    on_hit = touch
    on_insert = touch

    def distance(self, key: int) -> int:
        """Visits until the key's layer comes again: 1..layers."""
        return (key // self.experts - self.current) % self.layers or self.layers

    def victim(self, key: int, present: set[int]) -> int:
        def rank(k: int) -> tuple[int, int, int]:
            staleness = self.visits[k // self.experts] - self.touched[k]
            return (-staleness, -self.distance(k), self.when[k])

        return min(self.candidates(present), key=rank)


class Mix(Stale):
    """Mean of four decayed counts per visit of the key's own layer, less for layers far ahead."""

    half_lives = (1.0, 4.0, 16.0, 64.0)

    def start(self) -> None:
        super().start()
        self.decay = [math.pow(2.0, -1.0 / h) for h in self.half_lives]
        self.counts = [[0.0] * 4 for _ in range(self.layers * self.experts)]

    def on_set(self, layer: int, experts: Sequence[int]) -> None:
        super().on_set(layer, experts)
        for expert in range(self.experts):
            counts = self.counts[layer * self.experts + expert]
            for i, decay in enumerate(self.decay):
                counts[i] *= decay
                if expert in experts:
                    counts[i] += 1.0 - decay

    def worth(self, key: int) -> float:
        c0, c1, c2, c3 = self.counts[key]
        return math.log((c0 + c1 + c2 + c3) * 0.25 + 1e-9)

    def value(self, key: int) -> float:
        return self.worth(key) - 0.5 * self.distance(key) / self.layers

    def victim(self, key: int, present: set[int]) -> int:
        return min(self.candidates(present), key=lambda k: (self.value(k), k))


class Opt(Policy):
    """Belady 1966: the farthest next use leaves."""

    def victim(self, key: int, present: set[int]) -> int:
        return max(self.candidates(present), key=self.next_use.__getitem__)


class OptBypass(Policy):
    """The farthest next use leaves, present or not, if the newcomer's is nearer."""

    protects = False

    def victim(self, key: int, present: set[int]) -> int:
        return max(self.resident, key=self.next_use.__getitem__)

    def admit(self, key: int, victim: int) -> bool:
        return victim == -1 or self.next_use[key] < self.next_use[victim]


#: Every policy and bound by the name typed after --policy.
POLICIES: dict[str, type[Policy]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "lfu-decay": LfuDecay,
    "arc": Arc,
    "random": Random,
    "stale": Stale,
    "mix": Mix,
    "opt": Opt,
    "opt-bypass": OptBypass,
}
