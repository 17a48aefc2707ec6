"""Best possible misses by trying every choice; for tiny cases only.

A case is a list of access sets (sets of keys) served in turn by a pool of ``slots``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


def fewest_misses(sets: Sequence[frozenset[int]], slots: int | Sequence[int]) -> int:
    """Forced fill: every miss gets a slot, and a victim is never one of the present set.

    ``slots`` may be a number for each set: the pool shrinks or grows before the set is served.
    """
    best: dict[frozenset[int], int] = {frozenset(): 0}
    sizes = [slots] * len(sets) if isinstance(slots, int) else slots
    for members, size in zip(sets, sizes, strict=True):
        following: dict[frozenset[int], int] = {}
        for cache, misses in best.items():
            cost = misses + len(members - cache)
            others = cache - members
            leave = max(0, len(cache | members) - size)
            for gone in combinations(sorted(others), leave):
                kept = (others - set(gone)) | members
                following[kept] = min(cost, following.get(kept, cost))
        best = following
    return min(best.values())


def fewest_misses_bypassing(sets: Sequence[frozenset[int]], slots: int) -> int:
    """Anything goes: after each set any ``slots`` of (cache and set) may stay."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for members in sets:
        following: dict[frozenset[int], int] = {}
        for cache, misses in best.items():
            cost = misses + len(members - cache)
            union = cache | members
            for kept in map(frozenset, combinations(sorted(union), min(slots, len(union)))):
                following[kept] = min(cost, following.get(kept, cost))
        best = following
    return min(best.values())
