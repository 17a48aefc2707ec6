"""Adaptive replacement: a list of keys seen once (T1) and one of keys seen again (T2), each with a
ghost list of the recently evicted (B1, B2); ghost hits move the target size p of T1.

The target is a floating number, as in the paper's pseudo-code. Present members are skipped when a
victim is looked for; if the preferred list has no other, the victim comes from the other list.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.linked import Lists, new_lists, push_back, unlink

NAME = "arc"
VERSION = 1
SOURCE = "Megiddo & Modha 2003, ARC: a self-tuning, low overhead replacement cache"

T1, T2, B1, B2, NOWHERE = 0, 1, 2, 3, 4


class State(NamedTuple):
    lists: Lists  # T1, T2, B1, B2; least recent first
    where: npt.NDArray[np.int8]  # [keys], the list a key is in
    size: npt.NDArray[np.int64]  # [5]
    target: npt.NDArray[np.float64]  # [1], p


def init(geometry, slots, params):
    return State(
        lists=new_lists(geometry.keys, 4),
        where=np.full(geometry.keys, NOWHERE, np.int8),
        size=np.zeros(5, np.int64),
        target=np.zeros(1),
    )


def put(state, group, key, target):
    """Move a key to the most recent end of a list, or out of all lists."""
    unlink(state.lists, key)
    state.size[state.where[key]] -= 1
    state.where[key] = target
    state.size[target] += 1
    if target != NOWHERE:
        push_back(state.lists, group.keys + target, key)


def oldest_absent(state, cache, group, which):
    """The least recent key of a list that is not in the present set, or -1."""
    key = state.lists.next[group.keys + which]
    while key < group.keys:
        if cache.stamp[key] != cache.now[0]:
            return key
        key = state.lists.next[key]
    return -1


def on_hit(state, cache, group, key):
    put(state, group, key, T2)


def on_miss(state, cache, group, key):
    size = state.size
    if state.where[key] == B1:
        step = max(1.0, size[B2] / size[B1])
        state.target[0] = min(float(group.slots), state.target[0] + step)
    elif state.where[key] == B2:
        step = max(1.0, size[B1] / size[B2])
        state.target[0] = max(0.0, state.target[0] - step)


def victim(state, cache, group, key):
    in_t1 = state.size[T1]
    ghost_of_t2 = key >= 0 and state.where[key] == B2
    target = state.target[0]
    if in_t1 >= 1 and (in_t1 > target or (ghost_of_t2 and in_t1 == target)):
        first, second = T1, T2
    else:
        first, second = T2, T1
    chosen = oldest_absent(state, cache, group, first)
    if chosen < 0:
        chosen = oldest_absent(state, cache, group, second)
    return chosen


def on_evict(state, cache, group, key):
    put(state, group, key, B1 if state.where[key] == T1 else B2)


def on_insert(state, cache, group, key):
    ghost = state.where[key] == B1 or state.where[key] == B2
    put(state, group, key, T2 if ghost else T1)
    size = state.size
    while size[T1] + size[B1] > group.slots and size[B1] > 0:
        put(state, group, state.lists.next[group.keys + B1], NOWHERE)
    while size[T1] + size[T2] + size[B1] + size[B2] > 2 * group.slots and size[B2] > 0:
        put(state, group, state.lists.next[group.keys + B2], NOWHERE)
