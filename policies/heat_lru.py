"""LRU that spares the hot: from the least recent end, a key used more than n times is passed over
once and goes to the recent end with its count at zero.

Uses count since the upload, which is the first, or since the key was last spared. Present members
are passed over where they are. n = 0 is nearly CLOCK on LRU order; a large n is LRU.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.linked import Lists, first_absent, move_back, new_lists, push_back, unlink
from simlab.policy.protocol import Param

NAME = "heat-lru"
VERSION = 1
SOURCE = "simlab; second chance: Corbató 1968"
PARAMS = {"uses": Param(2, low=0, high=1e9, doc="n: spare a key used more often (whole number)")}


class State(NamedTuple):
    recency: Lists
    hits: npt.NDArray[np.int64]  # [keys], uses since the upload (the first) or since it was spared
    most: int


def init(geometry, slots, params):
    return State(
        recency=new_lists(geometry.keys, 1),
        hits=np.zeros(geometry.keys, np.int64),
        most=int(params["uses"]),
    )


def on_hit(state, cache, group, key):
    state.hits[key] += 1
    move_back(state.recency, group.keys, key)


def victim(state, cache, group, key):
    while True:
        coldest = first_absent(state.recency, cache, group.keys, group.keys)
        if state.hits[coldest] <= state.most:
            return coldest
        state.hits[coldest] = 0
        move_back(state.recency, group.keys, coldest)


def on_evict(state, cache, group, key):
    unlink(state.recency, key)


def on_insert(state, cache, group, key):
    state.hits[key] = 1
    push_back(state.recency, group.keys, key)
