"""LFU with dynamic aging: priority = uses since the upload + the priority of the last victim.

The lowest priority leaves (ties: lowest layer, then lowest expert). What was popular once is
overtaken by newcomers in the end, so it does not lock up as plain LFU does. Present members stay.
"""

from typing import NamedTuple

import numpy as np

from simlab.policy.aging import Aging, aged_out, aged_start, aged_use, new_aging
from simlab.policy.lowest import lowest_of_all, visit

NAME = "lfu-da"
VERSION = 1
SOURCE = "Arlitt et al. 1999, Evaluating content management techniques for web proxy caches"


class State(NamedTuple):
    aging: Aging


def init(geometry, slots, params):
    return State(new_aging(geometry.keys, np.ones(geometry.layers)))


def on_set(state, cache, group, layer, experts):
    visit(state.aging.lowest, layer)


def on_hit(state, cache, group, key):
    aged_use(state.aging, group, key)


def victim(state, cache, group, key):
    return lowest_of_all(state.aging.lowest, cache, group, state.aging.priority)


def on_evict(state, cache, group, key):
    aged_out(state.aging, group, key)


def on_insert(state, cache, group, key):
    aged_start(state.aging, group, key)
