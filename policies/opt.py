"""Belady's optimum: evict the key whose next use is farthest away, never one of the present set.

A bound for policies that fill on every miss (equal sizes in a pool), not something an engine can
run: it reads the future. Next uses count lookups on the cached path only.
"""

from typing import NamedTuple

from simlab.policy.timeline import Timeline, insert, latest_below, new_timeline, remove

NAME = "opt"
VERSION = 1
SOURCE = "Belady 1966, A study of replacement algorithms for a virtual-storage computer"
NEEDS = ("next_use",)
BOUND = True


class State(NamedTuple):
    future: Timeline


def init(geometry, slots, params):
    return State(future=new_timeline(geometry.keys, geometry.lookups))


def on_hit(state, cache, group, key):
    remove(state.future, key)
    insert(state.future, key, cache.next_use[key])


def victim(state, cache, group, key):
    position = latest_below(state.future, state.future.end)
    while position >= 0 and cache.stamp[state.future.owner[position]] == cache.now[0]:
        position = latest_below(state.future, position)
    if position < 0:
        return -1
    return state.future.owner[position]


def on_evict(state, cache, group, key):
    remove(state.future, key)


def on_insert(state, cache, group, key):
    insert(state.future, key, cache.next_use[key])
