"""LRU with a cap: of the misses of one layer's access set only the first few are given a slot.

The cap bounds what one layer may have to wait for the bus; further misses (in ascending expert id)
are declined, also while slots are empty. Order and victims are LRU's; the front of the list is
never a present member, for hits move before the first victim is named. Needs an engine that can
decline.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.linked import Lists, first_absent, move_back, new_lists, push_back, unlink
from simlab.policy.protocol import Param

NAME = "capped-lru"
VERSION = 1
SOURCE = "simlab; LRU: Denning 1968, The working set model"
PARAMS = {"uploads": Param(2, low=0, high=65536, doc="most uploads a layer (whole number)")}
DECLINES = True


class State(NamedTuple):
    recency: Lists
    uploaded: npt.NDArray[np.int64]  # [1], in the present set
    most: int


def init(geometry, slots, params):
    return State(new_lists(geometry.keys, 1), np.zeros(1, np.int64), int(params["uploads"]))


def on_set(state, cache, group, layer, experts):
    state.uploaded[0] = 0


def on_hit(state, cache, group, key):
    move_back(state.recency, group.keys, key)


def victim(state, cache, group, key):
    return first_absent(state.recency, cache, group.keys, group.keys)


def admit(state, cache, group, key, victim):
    return state.uploaded[0] < state.most


def on_evict(state, cache, group, key):
    unlink(state.recency, key)


def on_insert(state, cache, group, key):
    state.uploaded[0] += 1
    push_back(state.recency, group.keys, key)
