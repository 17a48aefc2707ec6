"""First in, first out: the key that was uploaded longest ago leaves; hits change nothing."""

from typing import NamedTuple

from simlab.policy.linked import Lists, first_absent, new_lists, push_back, unlink

NAME = "fifo"
VERSION = 1
SOURCE = "Belady 1966, A study of replacement algorithms for a virtual-storage computer"


class State(NamedTuple):
    arrival: Lists


def init(geometry, slots, params):
    return State(arrival=new_lists(geometry.keys, 1))


def victim(state, cache, group, key):
    return first_absent(state.arrival, cache, group.keys, group.keys)


def on_evict(state, cache, group, key):
    unlink(state.arrival, key)


def on_insert(state, cache, group, key):
    push_back(state.arrival, group.keys, key)
