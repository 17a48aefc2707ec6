"""Reuse distances: how many distinct keys of a pool are looked up between two uses of a key."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import cached_jit
from simlab.replay.access import Access

#: No earlier use, or not on the cached path.
NONE = -1
Reuses = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]


def reuse_distances(
    access: Access,
    served: npt.NDArray[np.bool_],
    index_in_pool: npt.NDArray[np.int32],
    n_expert: int,
    into: Reuses | None = None,
) -> Reuses:
    """Distance to the last use of each lookup's key, and where that use was.

    Args:
        served: bool [sets], which access sets are on the cached path; no others count.
        index_in_pool: int32 [MoE layers], index of a layer in the pool or -1.
        into: what was found of other pools; this pool's lookups are written there.

    Returns:
        distance: int32 [lookups], distinct other keys looked up since the key's last use, NONE at a
        first use and outside the pool; previous: int32 [lookups], that use's position or NONE.
        Members of a set follow one another in its order. Distances below S are what LRU with S
        slots hits where every lookup is served by itself.
    """
    layers = int(index_in_pool.max(initial=-1)) + 1
    if into is None:
        n = len(access.experts)
        into = np.full(n, NONE, np.int32), np.full(n, NONE, np.int32)
    _distances(
        access.set_layer,
        access.offsets,
        access.experts,
        served,
        index_in_pool,
        n_expert,
        max(1024, 4 * layers * n_expert),
        layers * n_expert,
        *into,
    )
    return into


@cached_jit(nogil=True)
def _distances(
    set_layer: Any,
    offsets: Any,
    experts: Any,
    served: Any,
    index_in_pool: Any,
    n_expert: int,
    length: int,
    keys: int,
    distance: Any,
    previous: Any,
) -> None:
    """A timeline of ``length`` places, one mark a key at its last use, in a Fenwick tree; a full
    timeline is closed up, keeping the order of its marks.
    """
    at = np.full(keys, -1, np.int64)  # place of a key's mark
    last = np.full(keys, -1, np.int64)  # position of its last lookup
    owner = np.full(length, -1, np.int64)
    tree = np.zeros(length + 1, np.int64)
    marks = 0
    end = 0
    for s in range(len(set_layer)):
        layer = index_in_pool[set_layer[s]]
        if layer < 0 or not served[s]:
            continue
        for i in range(offsets[s], offsets[s + 1]):
            key = layer * n_expert + experts[i]
            if at[key] >= 0:
                before = 0  # marks up to and with the key's own
                j = at[key] + 1
                while j > 0:
                    before += tree[j]
                    j -= j & -j
                distance[i] = marks - before
                previous[i] = last[key]
                j = at[key] + 1
                while j <= length:
                    tree[j] -= 1
                    j += j & -j
                owner[at[key]] = -1
                marks -= 1
            if end == length:
                tree[:] = 0
                end = 0
                for place in range(length):
                    other = owner[place]
                    owner[place] = -1
                    if other >= 0:
                        owner[end] = other
                        at[other] = end
                        end += 1
                for place in range(end):
                    j = place + 1
                    while j <= length:
                        tree[j] += 1
                        j += j & -j
            at[key] = end
            owner[end] = key
            last[key] = i
            j = end + 1
            while j <= length:
                tree[j] += 1
                j += j & -j
            end += 1
            marks += 1
