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


class Lowest(NamedTuple):
    """``key``: int32 [layers], lowest eligible key of a layer or -1. ``stale``: bool [layers], it
    must be looked for again. ``current``: int64 [1], the layer whose access set is being served.
    ``seen``: int64 [1], the set that was present as the current layer was looked at.
    """

    key: npt.NDArray[np.int32]
    stale: npt.NDArray[np.bool_]
    current: npt.NDArray[np.int64]
    seen: npt.NDArray[np.int64]


def new_lowest(n_layers: int) -> Lowest:
    """Nothing resident yet."""
    return Lowest(
        key=np.full(n_layers, -1, np.int32),
        stale=np.ones(n_layers, np.bool_),
        current=np.zeros(1, np.int64),
        seen=np.zeros(1, np.int64),
    )


@kernel_jit
def visit(lowest: Any, layer: int) -> None:
    """A new access set: the members of the one before may be evicted again, this one's may not."""
    lowest.stale[lowest.current[0]] = True
    lowest.stale[layer] = True
    lowest.current[0] = layer


@kernel_jit
def left(lowest: Any, group: Any, key: int) -> None:
    """A key was evicted."""
    lowest.stale[key // group.experts] = True


@kernel_jit
def refresh(lowest: Any, cache: Any, group: Any, layer: int, score: Any) -> bool:
    """Bring one layer up to date; True if it had to be rescanned. Ties: the lowest expert id.

    Args:
        score: float64 [keys].
    """
    if layer == lowest.current[0] and lowest.seen[0] != cache.now[0]:
        # another set is present, or none: between two sets a pool may shrink
        lowest.seen[0] = cache.now[0]
        lowest.stale[layer] = True
    if not lowest.stale[layer]:
        return False
    base = layer * group.experts
    end = base + group.experts
    # slices from 0 spare the checks for negative indices
    scores, slots = score[base:end], cache.slot_of[base:end]
    stamps, now = cache.stamp[base:end], cache.now[0]
    best = -1
    least = np.inf
    for expert in range(group.experts):
        if scores[expert] < least and slots[expert] >= 0 and stamps[expert] != now:
            least = scores[expert]
            best = expert
    lowest.key[layer] = base + best if best >= 0 else -1
    lowest.stale[layer] = False
    return True


@kernel_jit
def lowest_of_all(lowest: Any, cache: Any, group: Any, score: Any) -> Any:
    """The resident key outside the present set with the lowest score, or -1. Ties: the lowest key.

    Args:
        score: float64 [keys]; between two calls it may change in visited layers only, unless the
            order of the other layers' keys stays what it was.
    """
    best = np.int64(-1)
    least = np.inf
    for layer in range(group.layers):
        refresh(lowest, cache, group, layer, score)
        candidate = lowest.key[layer]
        if candidate >= 0 and score[candidate] < least:
            least = score[candidate]
            best = np.int64(candidate)
    return best
