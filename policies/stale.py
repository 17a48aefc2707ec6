"""Cyclic-aware LRU: evict what has missed the most visits of its own layer, needed last first.

Layers are visited in a fixed cycle, so plain recency evicts, among keys of the same token, those of
the layer that comes next. Here age is counted in visits of the key's own layer; among equally old
keys the one whose layer is farthest ahead in the cycle leaves. One recency list a layer.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.cycle import visits_ahead
from simlab.policy.linked import Lists, first_absent, move_back, new_lists, push_back, unlink

NAME = "stale"
VERSION = 1
SOURCE = "simlab; compare Least-Stale in SpecMD, arXiv 2602.03921"


class State(NamedTuple):
    recency: Lists  # one list a layer, sentinel at keys + layer
    touched: npt.NDArray[np.int64]  # [keys], the layer's visit count when last touched
    visits: npt.NDArray[np.int64]  # [layers]
    current: npt.NDArray[np.int64]  # [1], layer of the present set


def init(geometry, slots, params):
    return State(
        recency=new_lists(geometry.keys, geometry.layers),
        touched=np.zeros(geometry.keys, np.int64),
        visits=np.zeros(geometry.layers, np.int64),
        current=np.zeros(1, np.int64),
    )


def on_set(state, cache, group, layer, experts):
    state.visits[layer] += 1
    state.current[0] = layer


def on_hit(state, cache, group, key):
    layer = key // group.experts
    state.touched[key] = state.visits[layer]
    move_back(state.recency, group.keys + layer, key)


def victim(state, cache, group, key):
    best = np.int64(-1)
    most_missed = -1
    farthest = 0
    for layer in range(group.layers):
        oldest = first_absent(state.recency, cache, group.keys, group.keys + layer)
        if oldest < 0:
            continue
        missed = state.visits[layer] - state.touched[oldest]
        distance = visits_ahead(layer, state.current[0], group.layers)
        if missed > most_missed or (missed == most_missed and distance > farthest):
            best = oldest
            most_missed = missed
            farthest = distance
    return best


def on_evict(state, cache, group, key):
    unlink(state.recency, key)


def on_insert(state, cache, group, key):
    layer = key // group.experts
    state.touched[key] = state.visits[layer]
    push_back(state.recency, group.keys + layer, key)
