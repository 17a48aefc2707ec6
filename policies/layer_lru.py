"""LRU with a quota per layer: slots are dealt evenly to the layers, each keeps its own recency
list.

A layer that holds its quota gives up its own least recent key; while it holds less, the layer that
exceeds its quota most gives up one (it took slots while some were empty). Present members stay: if
the layer has no other, the one that exceeds its quota most gives way.
"""

from typing import NamedTuple

from simlab.policy.linked import Lists, first_absent, move_back, new_lists, push_back, unlink
from simlab.policy.quota import Quota, new_quota, quota_victim

NAME = "layer-lru"
VERSION = 1
SOURCE = "Eliseev & Mazur 2023, mixtral-offloading (arXiv 2312.17238): an LRU cache per layer"


class State(NamedTuple):
    recency: Lists  # one list a layer, sentinel at keys + layer
    quota: Quota


def init(geometry, slots, params):
    return State(new_lists(geometry.keys, geometry.layers), new_quota(geometry.layers, slots))


def on_hit(state, cache, group, key):
    move_back(state.recency, group.keys + key // group.experts, key)


def least_recent(state, cache, group, layer):
    return first_absent(state.recency, cache, group.keys, group.keys + layer)


def victim(state, cache, group, key):
    return quota_victim(state.quota, cache, group, key, least_recent, state)


def on_evict(state, cache, group, key):
    state.quota.held[key // group.experts] -= 1
    unlink(state.recency, key)


def on_insert(state, cache, group, key):
    layer = key // group.experts
    state.quota.held[layer] += 1
    push_back(state.recency, group.keys + layer, key)
