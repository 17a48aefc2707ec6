"""Adaptive replacement: a list of keys seen once (T1) and one of keys seen again (T2), each with a
ghost list of the recently evicted (B1, B2); ghost hits move the target size p of T1.

The target is a floating number, as in the paper's pseudo-code. Present members are skipped when a
victim is looked for; if the preferred list has no other, the victim comes from the other list.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.queues import NOWHERE, Queues, new_queues, oldest, oldest_absent, put

NAME = "arc"
VERSION = 1
SOURCE = "Megiddo & Modha 2003, ARC: a self-tuning, low overhead replacement cache"

T1, T2, B1, B2 = 1, 2, 3, 4


class State(NamedTuple):
    queues: Queues
    target: npt.NDArray[np.float64]  # [1], p


def init(geometry, slots, params):
    return State(queues=new_queues(geometry.keys, 4), target=np.zeros(1))


def on_hit(state, cache, group, key):
    put(state.queues, group, key, T2)


def on_miss(state, cache, group, key):
    size, where = state.queues.size, state.queues.where
    if where[key] == B1:
        step = max(1.0, size[B2] / size[B1])
        state.target[0] = min(float(group.slots), state.target[0] + step)
    elif where[key] == B2:
        step = max(1.0, size[B1] / size[B2])
        state.target[0] = max(0.0, state.target[0] - step)


def victim(state, cache, group, key):
    in_t1 = state.queues.size[T1]
    ghost_of_t2 = key >= 0 and state.queues.where[key] == B2
    target = state.target[0]
    if in_t1 >= 1 and (in_t1 > target or (ghost_of_t2 and in_t1 == target)):
        first, second = T1, T2
    else:
        first, second = T2, T1
    chosen = oldest_absent(state.queues, cache, group, first)
    if chosen < 0:
        chosen = oldest_absent(state.queues, cache, group, second)
    return chosen


def on_evict(state, cache, group, key):
    put(state.queues, group, key, B1 if state.queues.where[key] == T1 else B2)


def on_insert(state, cache, group, key):
    queues, size = state.queues, state.queues.size
    ghost = queues.where[key] == B1 or queues.where[key] == B2
    put(queues, group, key, T2 if ghost else T1)
    while size[T1] + size[B1] > group.slots and size[B1] > 0:
        put(queues, group, oldest(queues, group, B1), NOWHERE)
    while size[T1] + size[T2] + size[B1] + size[B2] > 2 * group.slots and size[B2] > 0:
        put(queues, group, oldest(queues, group, B2), NOWHERE)
