"""The passes of curves by themselves: an access's level is the least size that holds its key."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
import pytest

from simlab.replay.curve_lru import FEW_KEYS, MOST_KEYS, LruLevels
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
@pytest.mark.parametrize("in_a_set", [1, 5, 40])
def test_lru_levels_are_places_in_a_list(in_a_set: int, n_keys: int, every_size: bool) -> None:
    rng = np.random.default_rng(n_keys)
    keys = rng.zipf(1.3, 3000).astype(np.uint64) % n_keys
    experts = keys.astype(np.uint16)
    few = np.unique(rng.integers(1, n_keys + 2, 5))
    sizes = np.arange(1, n_keys + 1) if every_size else few
    levels = np.zeros(len(experts), np.uint16)
    offsets = np.arange(0, len(experts) + 1, in_a_set, dtype=np.int64)
    n_sets = len(offsets) - 1
    layer, index = np.zeros(n_sets, np.int16), np.zeros(1, np.int32)
    run = LruLevels(layer, offsets, experts, index, n_keys, n_keys, sizes, levels)
    for first in range(0, n_sets, 70):
        run.run(first, min(first + 70, n_sets))
    assert levels.tolist() == naive_levels(experts, sizes)


def test_lru_levels_of_several_groups() -> None:
    """Sets of other groups in between, empty ones, fewer accesses than are taken at once."""
    rng = np.random.default_rng(6)
    n_expert, sizes = 20, np.arange(1, 41)
    for n_sets in (0, 1, 3, 2000):
        layer = rng.integers(0, 4, n_sets).astype(np.int16)
        offsets = np.append(0, np.cumsum(rng.choice([0, 1, 8, 20], n_sets))).astype(np.int64)
        experts = rng.integers(0, n_expert, offsets[-1]).astype(np.uint16)
        levels = np.zeros(len(experts), np.uint16)
        of_access = np.repeat(layer, np.diff(offsets))
        for group in ((0, 2), (1, 3)):
            index = np.full(4, -1, np.int32)
            index[list(group)] = 0, 1
            run = LruLevels(layer, offsets, experts, index, n_expert, 2 * n_expert, sizes, levels)
            run.run(0, n_sets)
        for group in ((0, 2), (1, 3)):
            mine = np.isin(of_access, group)
            keys = experts[mine] + np.uint16(n_expert) * (of_access[mine] == group[1])
            assert levels[mine].tolist() == naive_levels(keys.astype(np.uint16), sizes)


@pytest.mark.parametrize("n_keys", [FEW_KEYS, MOST_KEYS])
def test_lru_levels_of_many_keys(n_keys: int) -> None:
    """Both timelines, filled up many times; sets across two words, counts near their largest."""
    rng = np.random.default_rng(4)
    accesses = 250_000
    keys = np.where(
        rng.random(accesses) < 0.5, rng.integers(0, n_keys, accesses), rng.zipf(1.2, accesses)
    )
    keys = np.append(np.arange(n_keys), keys % n_keys)
    sizes = np.arange(1, n_keys + 1)
    levels = np.zeros(len(keys), np.uint16)
    offsets = np.append(np.arange(0, len(keys), 7), len(keys)).astype(np.int64)
    layer, index = np.zeros(len(offsets) - 1, np.int16), np.zeros(1, np.int32)
    experts = keys.astype(np.uint16)
    LruLevels(layer, offsets, experts, index, n_keys, n_keys, sizes, levels).run(0, len(layer))
    assert (levels[:n_keys] == n_keys).all()
    for at in rng.integers(n_keys, len(keys), 400):
        since = np.flatnonzero(keys[:at] == keys[at])[-1] + 1
        assert levels[at] == len(np.unique(keys[since:at]))
