"""The lowest-scored resident key of each layer, rescanned only where something changed.

Score-based policies (decayed counts) ask at a miss for the lowest score over all resident keys
outside the present set. Between two misses only a few layers change, so each layer keeps its lowest
key and a flag: O(experts) a changed layer and O(layers) a miss instead of O(slots).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit

_INF = np.int64(np.float64(np.inf).view(np.int64))
_MIN = np.int64(-(2**63))


class Lowest(NamedTuple):
    """``key``: int32 [layers], lowest eligible key of a layer or -1. ``stale``: bool [layers], it
    must be looked for again; ``waiting``: int32 [layers], those layers, the first ``n_waiting``:
    int64 [1]. ``current``: int64 [1], the layer whose access set is being served. ``seen``: int64
    [1], the set that was present as the current layer was looked at.
    """

    key: npt.NDArray[np.int32]
    stale: npt.NDArray[np.bool_]
    waiting: npt.NDArray[np.int32]
    n_waiting: npt.NDArray[np.int64]
    current: npt.NDArray[np.int64]
    seen: npt.NDArray[np.int64]


def new_lowest(n_layers: int) -> Lowest:
    """Nothing resident yet."""
    return Lowest(
        key=np.full(n_layers, -1, np.int32),
        stale=np.ones(n_layers, np.bool_),
        waiting=np.arange(n_layers, dtype=np.int32),
        n_waiting=np.full(1, n_layers, np.int64),
        current=np.zeros(1, np.int64),
        seen=np.zeros(1, np.int64),
    )


@kernel_jit
def _look_again(lowest: Any, layer: int) -> None:
    if not lowest.stale[layer]:
        lowest.stale[layer] = True
        lowest.waiting[lowest.n_waiting[0]] = layer
        lowest.n_waiting[0] += 1


@kernel_jit
def visit(lowest: Any, layer: int) -> None:
    """A new access set: the members of the one before may be evicted again, this one's may not."""
    _look_again(lowest, lowest.current[0])
    _look_again(lowest, layer)
    lowest.current[0] = layer


@kernel_jit
def left(lowest: Any, group: Any, key: int) -> None:
    """A key was evicted."""
    _look_again(lowest, key // group.experts)


@kernel_jit
def next_stale(lowest: Any, cache: Any) -> Any:
    """Take out a layer to be looked at again (write its ``key``), or -1 when none is left."""
    if lowest.seen[0] != cache.now[0]:
        # another set is present, or none: between two sets a pool may shrink
        lowest.seen[0] = cache.now[0]
        _look_again(lowest, lowest.current[0])
    if lowest.n_waiting[0] == 0:
        return np.int64(-1)
    lowest.n_waiting[0] -= 1
    layer = np.int64(lowest.waiting[lowest.n_waiting[0]])
    lowest.stale[layer] = False
    return layer


@kernel_jit
def in_order(x: float) -> Any:
    """A float64, no NaN, as an int64 in the same order: what a loop can find the least of in vector
    operations.
    """
    bits = np.float64(x).view(np.int64)
    return _MIN - bits if bits < 0 else bits


@kernel_jit
def from_order(value: int) -> Any:
    """The float64 that in_order made this int64 of."""
    return np.int64(_MIN - value if value < 0 else value).view(np.float64)


@kernel_jit
def lowest_in_layer(cache: Any, group: Any, layer: int, score: Any) -> Any:
    """The resident key of a layer, outside the present set, with the lowest score, or -1. Ties: the
    lowest expert id.

    Args:
        score: float64 [keys], no NaN; infinity counts as not resident.
    """
    base = np.int64(layer) * group.experts
    end = base + group.experts
    # slices from 0 spare the checks for negative indices
    scores, slots = score[base:end], cache.slot_of[base:end]
    stamps, now = cache.stamp[base:end], cache.now[0]
    least = _INF
    for expert in range(group.experts):
        value = in_order(scores[expert])
        value = value if slots[expert] >= 0 else _INF
        value = value if stamps[expert] != now else _INF
        least = min(least, value)
    if least == _INF:
        return np.int64(-1)
    best = 0
    while in_order(scores[best]) != least or slots[best] < 0 or stamps[best] == now:
        best += 1
    return base + best


@kernel_jit
def lowest_of_all(lowest: Any, cache: Any, group: Any, score: Any) -> Any:
    """The resident key outside the present set with the lowest score, or -1. Ties: the lowest key.

    Args:
        score: float64 [keys]; between two calls it may change in visited layers only, unless the
            order of the other layers' keys stays what it was.
    """
    layer = next_stale(lowest, cache)
    while layer >= 0:
        lowest.key[layer] = lowest_in_layer(cache, group, layer, score)
        layer = next_stale(lowest, cache)
    best = np.int64(-1)
    least = np.inf
    for layer in range(group.layers):
        candidate = lowest.key[layer]
        if candidate >= 0 and score[candidate] < least:
            least = score[candidate]
            best = np.int64(candidate)
    return best
