"""LRFU: a use counts 1 and fades with a half-life in tokens; the lowest sum of faded uses leaves.

Between LRU (a half-life near 0) and LFU (a long one). Sums are kept for all keys, resident or not.
Ties: lowest layer, then lowest expert. Present members stay. The best half-life grows with the
slots: about 4 tokens at 5-10 % of the keys, 12 at 25 %, 24 at 50 %.
"""

from typing import NamedTuple

from simlab.policy.decayed import HALF_LIFE, Decayed, decayed_uses, new_decayed
from simlab.policy.lowest import left, lowest_of_all

NAME = "lrfu"
VERSION = 1
SOURCE = "Lee et al. 2001, LRFU: a spectrum of policies"
PARAMS = {"half_life": HALF_LIFE}


class State(NamedTuple):
    decayed: Decayed


def init(geometry, slots, params):
    return State(new_decayed(geometry.keys, geometry.layers, params["half_life"]))


def on_step(state, cache, group, tokens):
    state.decayed.clock[0] += tokens


def on_set(state, cache, group, layer, experts):
    decayed_uses(state.decayed, group, layer, experts)


def victim(state, cache, group, key):
    return lowest_of_all(state.decayed.lowest, cache, group, state.decayed.rank)


def on_evict(state, cache, group, key):
    left(state.decayed.lowest, group, key)
