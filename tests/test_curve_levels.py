"""The passes of curves by themselves: an access's level is the least size that holds its key."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
import pytest

from simlab.replay.curve_lru import MOST_KEYS, LruLevels
from simlab.replay.curve_opt import OptLevels


def naive_belady(keys: list[int], next_use: list[int], slots: int) -> list[bool]:
    """Hits of a pool that gives up the key used again farthest ahead."""
    held: dict[int, int] = {}  # key -> its next use
    ahead: list[tuple[int, int]] = []  # (-next use, key), the outdated ones too
    hits = []
    for key, use in zip(keys, next_use, strict=True):
        hits.append(key in held)
        while key not in held and len(held) == slots:
            negative, gone = heappop(ahead)
            if held.get(gone) == -negative:
                del held[gone]
        held[key] = use
        heappush(ahead, (-use, key))
    return hits


def test_opt_levels_of_large_groups() -> None:
    """Groups of more than 128, and of more than 2,048 slots: three levels of maxima."""
    rng = np.random.default_rng(5)
    n_keys = 4000
    keys = (rng.integers(0, n_keys, 60_000) * rng.random(60_000) ** 0.3).astype(np.uint16)
    next_use = np.zeros(len(keys), np.int32)
    coming = {key: len(keys) + key for key in range(n_keys)}
    for i in range(len(keys) - 1, -1, -1):
        next_use[i] = coming[int(keys[i])]
        coming[int(keys[i])] = i
    sizes = np.array([7, 400, 2900, 3000, 3200])
    levels = np.zeros(len(keys), np.uint16)
    offsets = np.arange(len(keys) + 1, dtype=np.int64)
    layer, index = np.zeros(len(keys), np.int16), np.zeros(1, np.int32)
    cached = np.ones(len(keys), np.bool_)
    sets = (layer, offsets, keys, next_use, cached, index)
    OptLevels(*sets, n_keys, n_keys, True, sizes, levels).run(0, len(keys))
    for level, slots in enumerate(sizes.tolist()):
        hits = naive_belady(keys.tolist(), next_use.tolist(), slots)
        assert (levels <= level).tolist() == hits, slots


def naive_levels(keys: npt.NDArray[np.uint16], sizes: npt.NDArray[np.int64]) -> list[int]:
    """The stack as a list, most recent first; an access's place in it decides."""
    stack: list[int] = []
    levels = []
    for key in keys.tolist():
        depth = stack.index(key) if key in stack else 10**9
        levels.append(sum(depth >= size for size in sizes))
        if key in stack:
            stack.remove(key)
        stack.insert(0, key)
    return levels


@pytest.mark.parametrize("every_size", [False, True])
@pytest.mark.parametrize("n_keys", [1, 7, 300])
def test_lru_levels_are_places_in_a_list(n_keys: int, every_size: bool) -> None:
    rng = np.random.default_rng(n_keys)
    keys = rng.zipf(1.3, 3000).astype(np.uint64) % n_keys
    experts = keys.astype(np.uint16)
    few = np.unique(rng.integers(1, n_keys + 2, 5))
    sizes = np.arange(1, n_keys + 1) if every_size else few
    levels = np.zeros(len(experts), np.uint16)
    offsets = np.arange(len(experts) + 1, dtype=np.int64)
    layer, index = np.zeros(len(experts), np.int16), np.zeros(1, np.int32)
    run = LruLevels(layer, offsets, experts, index, n_keys, n_keys, sizes, levels)
    for first in range(0, len(experts), 700):
        run.run(first, min(first + 700, len(experts)))
    assert levels.tolist() == naive_levels(experts, sizes)


def test_lru_levels_of_the_most_keys() -> None:
    """Timelines that fill up many times, sets across two words, counts near their largest."""
    rng = np.random.default_rng(4)
    accesses = 250_000
    keys = np.where(
        rng.random(accesses) < 0.5, rng.integers(0, MOST_KEYS, accesses), rng.zipf(1.2, accesses)
    )
    keys = np.append(np.arange(MOST_KEYS), keys % MOST_KEYS)
    sizes = np.arange(1, MOST_KEYS + 1)
    levels = np.zeros(len(keys), np.uint16)
    offsets = np.append(np.arange(0, len(keys), 7), len(keys)).astype(np.int64)
    layer, index = np.zeros(len(offsets) - 1, np.int16), np.zeros(1, np.int32)
    experts = keys.astype(np.uint16)
    LruLevels(layer, offsets, experts, index, MOST_KEYS, MOST_KEYS, sizes, levels).run(
        0, len(layer)
    )
    assert (levels[:MOST_KEYS] == MOST_KEYS).all()
    for at in rng.integers(MOST_KEYS, len(keys), 400):
        since = np.flatnonzero(keys[:at] == keys[at])[-1] + 1
        assert levels[at] == len(np.unique(keys[since:at]))
