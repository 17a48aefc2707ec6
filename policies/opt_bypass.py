"""The bound for every policy, also those that decline: after each access set keep the keys of
(cache and set) with the nearest next uses; the present set is not protected.

A lower bound on misses, not an executable plan: the engine needs the whole set resident at once.
With experts of unequal size in one pool (``bmoe``) it is not a bound.
"""

from typing import NamedTuple

from simlab.policy.timeline import Timeline, insert, latest_below, new_timeline, remove

NAME = "opt-bypass"
VERSION = 1
SOURCE = "Belady 1966; Michaud 2016, Some mathematical facts about optimal cache replacement"
NEEDS = ("next_use",)
BOUND = True
DECLINES = True


class State(NamedTuple):
    future: Timeline


def init(geometry, slots, params):
    return State(future=new_timeline(geometry.keys, geometry.lookups))


def on_hit(state, cache, group, key):
    remove(state.future, key)
    insert(state.future, key, cache.next_use[key])


def victim(state, cache, group, key):
    return state.future.owner[latest_below(state.future, state.future.end)]


def admit(state, cache, group, key, victim):
    return victim < 0 or cache.next_use[key] < state.future.at[victim]


def on_evict(state, cache, group, key):
    remove(state.future, key)


def on_insert(state, cache, group, key):
    insert(state.future, key, cache.next_use[key])
