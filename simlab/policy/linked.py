"""Doubly linked lists over keys in flat arrays: the building block of LRU, FIFO, CLOCK and LFU.

Several lists share the two arrays; list i has its sentinel at position n_keys + i, so that linking
needs no branches. Every function is compiled; positions are uint32, which spares numba the check
for negative indices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit


class Lists(NamedTuple):
    """``prev`` and ``next``: uint32 [n_keys + n_lists]. A key in no list points to itself."""

    prev: npt.NDArray[np.uint32]
    next: npt.NDArray[np.uint32]


def new_lists(n_keys: int, n_lists: int) -> Lists:
    """``n_lists`` empty lists over ``n_keys`` keys."""
    here = np.arange(n_keys + n_lists, dtype=np.uint32)
    return Lists(prev=here.copy(), next=here.copy())


@kernel_jit
def unlink(lists: Lists, key: int) -> None:
    """Take a key out of its list (harmless when it is in none)."""
    before = lists.prev[key]
    after = lists.next[key]
    lists.next[before] = after
    lists.prev[after] = before
    lists.prev[key] = key
    lists.next[key] = key


@kernel_jit
def push_back(lists: Lists, sentinel: int, key: int) -> None:
    """Put a key that is in no list at the end of the list of ``sentinel``."""
    tail = lists.prev[sentinel]
    lists.next[tail] = key
    lists.prev[key] = tail
    lists.next[key] = sentinel
    lists.prev[sentinel] = key


@kernel_jit
def move_back(lists: Lists, sentinel: int, key: int) -> None:
    """Move a listed key to the end of the list of ``sentinel``."""
    before = lists.prev[key]
    after = lists.next[key]
    lists.next[before] = after
    lists.prev[after] = before
    tail = lists.prev[sentinel]
    lists.next[tail] = key
    lists.prev[key] = tail
    lists.next[key] = sentinel
    lists.prev[sentinel] = key


@kernel_jit
def first_absent(lists: Lists, cache: Any, n_keys: int, sentinel: int) -> Any:
    """The first key of a list that is not in the present access set, or -1."""
    key = lists.next[sentinel]
    while key < n_keys:
        if cache.stamp[key] != cache.now[0]:
            return np.int64(key)
        key = lists.next[key]
    return np.int64(-1)
