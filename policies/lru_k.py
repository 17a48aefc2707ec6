"""LRU-K: evict the key whose k-th last use is longest ago; keys with fewer uses leave first, by
LRU.

Time counts lookups; uses are remembered for all keys, resident or not (the paper's retained
information, without an end), and there is no correlated reference period. Present members stay.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.lowest import Lowest, left, lowest_of_all, new_lowest, visit
from simlab.policy.protocol import Param

NAME = "lru-k"
VERSION = 1
SOURCE = "O'Neil, O'Neil & Weikum 1993, The LRU-K page replacement algorithm"
PARAMS = {"k": Param(2, low=1, high=16, doc="which last use counts (whole number)")}

NEVER = -(2.0**52)  # below every time: no k uses yet


class State(NamedTuple):
    used: npt.NDArray[np.int64]  # [keys, k], times of the last uses, latest first, 0 for none
    score: npt.NDArray[np.float64]  # [keys]
    lowest: Lowest
    clock: npt.NDArray[np.int64]  # [1]


def init(geometry, slots, params):
    return State(
        used=np.zeros((geometry.keys, int(params["k"])), np.int64),
        score=np.full(geometry.keys, NEVER),
        lowest=new_lowest(geometry.layers),
        clock=np.zeros(1, np.int64),
    )


def on_set(state, cache, group, layer, experts):
    visit(state.lowest, layer)
    last = state.used.shape[1] - 1
    for expert in experts:
        key = layer * group.experts + expert
        state.clock[0] += 1
        for i in range(last, 0, -1):
            state.used[key, i] = state.used[key, i - 1]
        state.used[key, 0] = state.clock[0]
        if state.used[key, last] > 0:
            state.score[key] = state.used[key, last]
        else:
            state.score[key] = NEVER + state.clock[0]


def victim(state, cache, group, key):
    return lowest_of_all(state.lowest, cache, group, state.score)


def on_evict(state, cache, group, key):
    left(state.lowest, group, key)
