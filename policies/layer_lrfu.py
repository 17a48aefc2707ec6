"""LRFU with a quota per layer: slots are dealt evenly to the layers; within a layer the lowest sum
of faded uses leaves.

Quota as in `layer-lru`, sums as in `lrfu` (kept for all keys; a half-life in tokens). Present
members stay; ties: lowest expert.
"""

from typing import NamedTuple

from simlab.policy.decayed import HALF_LIFE, Decayed, decayed_uses, new_decayed
from simlab.policy.lowest import lowest_in_layer
from simlab.policy.quota import Quota, new_quota, quota_victim

NAME = "layer-lrfu"
VERSION = 1
SOURCE = "simlab; LRFU: Lee et al. 2001; a cache per layer: mixtral-offloading, arXiv 2312.17238"
PARAMS = {"half_life": HALF_LIFE}


class State(NamedTuple):
    decayed: Decayed
    quota: Quota


def init(geometry, slots, params):
    decayed = new_decayed(geometry.keys, geometry.layers, params["half_life"])
    return State(decayed, new_quota(geometry.layers, slots))


def on_step(state, cache, group, tokens):
    state.decayed.clock[0] += tokens


def on_set(state, cache, group, layer, experts):
    decayed_uses(state.decayed, group, layer, experts)


def least_used(state, cache, group, layer):
    return lowest_in_layer(cache, group, layer, state.decayed.rank)


def victim(state, cache, group, key):
    return quota_victim(state.quota, cache, group, key, least_used, state)


def on_evict(state, cache, group, key):
    state.quota.held[key // group.experts] -= 1


def on_insert(state, cache, group, key):
    state.quota.held[key // group.experts] += 1
