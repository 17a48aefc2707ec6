"""GreedyDual-Size-Frequency: priority = uses since the upload x cost / size + the last victim's.

The cost of a miss is 1, the size that of an expert of the layer over the pool's mean, so small
experts are dearer to keep per byte and stay longer. Sizes differ only within the one pool of
``bmoe``; in a pool of equal experts (llama.cpp's groups) it is `lfu-da`. Present members stay.
"""

from typing import NamedTuple

import numpy as np

from simlab.policy.aging import Aging, aged_out, aged_start, aged_use, new_aging
from simlab.policy.lowest import lowest_of_all, visit

NAME = "gdsf"
VERSION = 1
SOURCE = "Cherkasova 1998, Improving WWW proxies performance with GreedyDual-Size-Frequency"
NEEDS = ("bytes",)


class State(NamedTuple):
    aging: Aging


def init(geometry, slots, params):
    return State(new_aging(geometry.keys, np.mean(geometry.layer_bytes) / geometry.layer_bytes))


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
