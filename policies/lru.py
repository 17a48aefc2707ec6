"""Least recently used: what llama.cpp's MoE cache and SGLang's paged experts do.

Hits and inserts move a key to the back of one list shared by all layers; the front leaves. All hits
of an access set move before the first victim is named, so the front is never a present member.
"""

from typing import NamedTuple

from simlab.policy.linked import Lists, after, move_back, new_lists, push_back, unlink

NAME = "lru"
VERSION = 1
SOURCE = "Denning 1968, The working set model; llama.cpp src/llama-moe-cache.cpp"


class State(NamedTuple):
    recency: Lists


def init(geometry, slots, params):
    return State(recency=new_lists(geometry.keys, 1))


def on_hit(state, cache, group, key):
    move_back(state.recency, group.keys, key)


def victim(state, cache, group, key):
    return after(state.recency, group.keys)


def on_evict(state, cache, group, key):
    unlink(state.recency, key)


def on_insert(state, cache, group, key):
    push_back(state.recency, group.keys, key)
