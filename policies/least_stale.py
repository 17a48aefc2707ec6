"""Least-Stale: keys not used in the present step (stale) leave before those used in it, whose
copies the pass has just paid for.

Among the stale, and among the current, the key whose layer comes again last leaves, and of one
layer the least recent. Our reading of the paper's idea of stale and current experts; its code was
not compared. Present members stay.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.cycle import visits_ahead
from simlab.policy.linked import Lists, first_absent, move_back, new_lists, push_back, unlink

NAME = "least-stale"
VERSION = 1
SOURCE = "Hoang et al. 2026, SpecMD, arXiv 2602.03921"


class State(NamedTuple):
    recency: Lists  # one list a layer, sentinel at keys + layer
    used: npt.NDArray[np.int64]  # [keys], step of the last use
    step: npt.NDArray[np.int64]  # [1]
    current: npt.NDArray[np.int64]  # [1], layer of the present set


def init(geometry, slots, params):
    return State(
        recency=new_lists(geometry.keys, geometry.layers),
        used=np.zeros(geometry.keys, np.int64),
        step=np.zeros(1, np.int64),
        current=np.zeros(1, np.int64),
    )


def on_step(state, cache, group, tokens):
    state.step[0] += 1


def on_set(state, cache, group, layer, experts):
    state.current[0] = layer


def on_hit(state, cache, group, key):
    state.used[key] = state.step[0]
    move_back(state.recency, group.keys + key // group.experts, key)


def victim(state, cache, group, key):
    best = np.int64(-1)
    farthest = 0
    for layer in range(group.layers):
        oldest = first_absent(state.recency, cache, group.keys, group.keys + layer)
        if oldest < 0:
            continue
        rank = visits_ahead(layer, state.current[0], group.layers)
        if state.used[oldest] < state.step[0]:
            rank += group.layers
        if rank > farthest:
            best = oldest
            farthest = rank
    return best


def on_evict(state, cache, group, key):
    unlink(state.recency, key)


def on_insert(state, cache, group, key):
    state.used[key] = state.step[0]
    push_back(state.recency, group.keys + key // group.experts, key)
