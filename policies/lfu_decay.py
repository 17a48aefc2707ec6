"""Decayed frequency with admission: the LFU column of article 000's toy table.

Every pick adds 1 to its key's score, resident or not; once a token all scores shrink by
2^(-1/half_life). A newcomer replaces the lowest score only if its own score is at least as high,
otherwise the miss is declined: needs an engine that can stream or compute a declined expert.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.lowest import Lowest, left, lowest_of_all, new_lowest, visit
from simlab.policy.protocol import Param

NAME = "lfu-decay"
VERSION = 1
SOURCE = "article 000, toy table; LRFU: Lee et al. 2001"
PARAMS = {"half_life": Param(256.0, low=0.01, high=1e9, doc="tokens after which a score is halved")}
DECLINES = True


class State(NamedTuple):
    score: npt.NDArray[np.float64]  # [keys]
    lowest: Lowest
    half_life: float
    started: npt.NDArray[np.bool_]  # [1]


def init(geometry, slots, params):
    return State(
        score=np.zeros(geometry.keys),
        lowest=new_lowest(geometry.layers),
        half_life=float(params["half_life"]),
        started=np.zeros(1, np.bool_),
    )


def on_step(state, cache, group, tokens):
    if state.started[0]:
        factor = math.pow(2.0, -tokens / state.half_life)
        for key in range(group.keys):
            state.score[key] *= factor
    state.started[0] = True


def on_set(state, cache, group, layer, experts):
    visit(state.lowest, layer)
    base = layer * group.experts
    for i in range(experts.shape[0]):
        state.score[base + experts[i]] += 1.0


def victim(state, cache, group, key):
    return lowest_of_all(state.lowest, cache, group, state.score)


def admit(state, cache, group, key, victim):
    return victim < 0 or state.score[key] >= state.score[victim]


def on_evict(state, cache, group, key):
    left(state.lowest, group, key)
