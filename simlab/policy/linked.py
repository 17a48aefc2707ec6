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
    """``links``: uint32 [2 (n_keys + n_lists)], of each position the ones before and after it, side
    by side since most steps need both; in one row, since with two dimensions every step would wait
    for a multiplication. A key in no list points to itself.
    """

    links: npt.NDArray[np.uint32]


def new_lists(n_keys: int, n_lists: int) -> Lists:
    """``n_lists`` empty lists over ``n_keys`` keys."""
    here = np.arange(n_keys + n_lists, dtype=np.uint32)
    return Lists(links=np.repeat(here, 2))


@kernel_jit
def before(lists: Lists, position: int) -> Any:
    """The position before a key (or the last of a sentinel's list): uint32."""
    return lists.links[2 * np.uint32(position)]


@kernel_jit
def after(lists: Lists, position: int) -> Any:
    """The position after a key (or the first of a sentinel's list): uint32."""
    return lists.links[2 * np.uint32(position) + 1]


@kernel_jit
def _join(lists: Lists, left: int, right: int) -> None:
    """Make two positions neighbours."""
    lists.links[2 * np.uint32(left) + 1] = right
    lists.links[2 * np.uint32(right)] = left


@kernel_jit
def unlink(lists: Lists, key: int) -> None:
    """Take a key out of its list (harmless when it is in none)."""
    _join(lists, before(lists, key), after(lists, key))
    _join(lists, key, key)


@kernel_jit
def insert_after(lists: Lists, left: int, key: int) -> None:
    """Put a key that is in no list right after a position."""
    right = after(lists, left)
    _join(lists, left, key)
    _join(lists, key, right)


@kernel_jit
def push_back(lists: Lists, sentinel: int, key: int) -> None:
    """Put a key that is in no list at the end of the list of ``sentinel``."""
    tail = before(lists, sentinel)
    _join(lists, tail, key)
    _join(lists, key, sentinel)


@kernel_jit
def move_back(lists: Lists, sentinel: int, key: int) -> None:
    """Move a listed key to the end of the list of ``sentinel``."""
    _join(lists, before(lists, key), after(lists, key))
    push_back(lists, sentinel, key)


@kernel_jit
def first_absent(lists: Lists, cache: Any, n_keys: int, sentinel: int) -> Any:
    """The first key of a list that is not in the present access set, or -1."""
    key = after(lists, sentinel)
    while key < n_keys:
        if cache.stamp[key] != cache.now[0]:
            return np.int64(key)
        key = after(lists, key)
    return np.int64(-1)
