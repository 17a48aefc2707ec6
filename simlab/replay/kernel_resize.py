"""Pools whose size varies over time; part of each generated module.

What follows the mark below is appended to kernel.py's text there, hence the imports above it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simlab.policy.jit import cached_jit
from simlab.replay.default_hooks import on_evict, victim
from simlab.replay.kernel import NOT_RESIDENT

# simlab: appended


@cached_jit(_nrt=False)
def resize(state: Any, cache: Any, group: Any, capacity: int, fills: Any) -> int:
    """Shrink or grow a pool, between two steps, to its first ``capacity`` slots.

    The policy names who leaves a pool that shrinks; who stays in a slot that is given back moves to
    a free one (a copy on the device: nothing is uploaded). Empty slots fill in index order again.

    Args:
        capacity: at most the slots that the cache was made with.
        fills: int32 [1 or more, 3], scratch.

    Returns:
        0, or NOT_RESIDENT with the bad key in fills[0, 0].
    """
    cache.now[0] += 1  # no set is present
    residents = 0
    for slot in range(cache.key_of.shape[0]):
        residents += cache.key_of[slot] >= 0
    while residents > capacity:
        out = victim(state, cache, group, -1)
        if out < 0 or out >= group.keys or cache.slot_of[out] < 0:
            fills[0, 0] = out
            return NOT_RESIDENT
        gone = np.uint32(out)
        cache.key_of[cache.slot_of[gone]] = -1
        cache.slot_of[gone] = -1
        residents -= 1
        on_evict(state, cache, group, gone)
    free = 0
    for slot in range(capacity, cache.key_of.shape[0]):
        key = cache.key_of[slot]
        if key >= 0:
            while cache.key_of[free] >= 0:
                free += 1
            cache.key_of[free] = key
            cache.key_of[slot] = -1
            cache.slot_of[np.uint32(key)] = free
    cache.n_free[0] = 0
    for back in range(capacity):
        slot = capacity - 1 - back
        if cache.key_of[slot] < 0:
            cache.free[cache.n_free[0]] = slot
            cache.n_free[0] += 1
    return 0
