"""S3-FIFO: a small FIFO of a tenth of the slots, a main FIFO, and a ghost FIFO of keys that left
the small one; two hits in the small queue or a return from the ghosts lead to the main queue.

From the small queue keys with two hits or more move to the main one and the first other leaves;
from the main queue a key with hits goes round again with one hit fewer (at most three count). As in
libCacheSim's S3FIFO.c (2024) newcomers go to the main queue when the small one is full before the
first eviction; the paper's first code put them all into the small one. Present members are passed
over and stay where they are; a queue without others gives way to the other queue. The small queue
is too short for a layer cycle: give `small` more than one cycle.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.linked import after, move_back
from simlab.policy.protocol import Param
from simlab.policy.queues import NOWHERE, Queues, new_queues, oldest, put

NAME = "s3fifo"
VERSION = 1
SOURCE = "Yang et al. 2023, FIFO queues are all you need for cache eviction (SOSP)"
PARAMS = {
    "small": Param(0.1, low=0, high=1, doc="share of the slots for the small queue"),
    "ghost": Param(0.9, low=0, high=100, doc="remembered keys as a share of the slots"),
}

SMALL, MAIN, GHOST = 1, 2, 3
PROVEN = 2  # hits in the small queue that lead to the main one
MOST = 3  # hits that count


class State(NamedTuple):
    queues: Queues
    hits: npt.NDArray[np.int8]  # [keys]
    returning: npt.NDArray[np.bool_]  # [1], the missing key is a ghost
    full: npt.NDArray[np.bool_]  # [1], something was evicted
    most_small: int
    most_main: int
    most_ghost: int


def init(geometry, slots, params):
    small = max(1, int(slots * params["small"]))
    return State(
        queues=new_queues(geometry.keys, 3),
        hits=np.zeros(geometry.keys, np.int8),
        returning=np.zeros(1, np.bool_),
        full=np.zeros(1, np.bool_),
        most_small=small,
        most_main=slots - small,
        most_ghost=int(slots * params["ghost"]),
    )


def on_hit(state, cache, group, key):
    state.hits[key] = min(state.hits[key] + 1, MOST)


def on_miss(state, cache, group, key):
    state.returning[0] = state.queues.where[key] == GHOST
    if state.returning[0]:
        put(state.queues, group, key, NOWHERE)


def from_small(state, cache, group):
    """The first key to leave the small queue, or -1; those before it move to the main queue."""
    lists = state.queues.lists
    key = np.int64(after(lists, group.keys + SMALL))
    while key < group.keys:
        following = np.int64(after(lists, key))
        if cache.stamp[key] != cache.now[0]:
            if state.hits[key] < PROVEN:
                return key
            state.hits[key] = 0
            put(state.queues, group, key, MAIN)
        key = following
    return np.int64(-1)


def from_main(state, cache, group):
    """The first key to leave the main queue, or -1; those before it go round again."""
    lists = state.queues.lists
    sentinel = group.keys + MAIN
    again = True
    while again:  # as long as some key may still come to zero
        again = False
        key = np.int64(after(lists, sentinel))
        for _ in range(state.queues.size[MAIN]):
            following = np.int64(after(lists, key))
            if cache.stamp[key] != cache.now[0]:
                if state.hits[key] == 0:
                    return key
                state.hits[key] -= 1
                move_back(lists, sentinel, key)
                again = True
            key = following
    return np.int64(-1)


def victim(state, cache, group, key):
    state.full[0] = True
    size = state.queues.size
    chosen = np.int64(-1)
    if size[MAIN] > state.most_main or size[SMALL] == 0:
        chosen = from_main(state, cache, group)
    if chosen < 0:
        chosen = from_small(state, cache, group)
    if chosen < 0:
        chosen = from_main(state, cache, group)
    return chosen


def on_evict(state, cache, group, key):
    queues = state.queues
    put(queues, group, key, GHOST if queues.where[key] == SMALL else NOWHERE)
    while queues.size[GHOST] > state.most_ghost:
        put(queues, group, oldest(queues, group, GHOST), NOWHERE)


def on_insert(state, cache, group, key):
    state.hits[key] = 0
    crowded = not state.full[0] and state.queues.size[SMALL] >= state.most_small
    put(state.queues, group, key, MAIN if state.returning[0] or crowded else SMALL)
