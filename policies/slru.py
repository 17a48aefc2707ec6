"""Segmented LRU: newcomers are on probation, a hit protects; the protected segment holds a share of
the slots and its least recent key goes back on probation.

The least recent key on probation leaves. Present members are passed over; if all on probation are
present, the least recent protected key leaves.
"""

from typing import NamedTuple

from simlab.policy.protocol import Param
from simlab.policy.queues import NOWHERE, Queues, new_queues, oldest_absent, promote, put

NAME = "slru"
VERSION = 1
SOURCE = "Karedla, Love & Wherry 1994, Caching strategies to improve disk system performance"
PARAMS = {"protected": Param(0.8, low=0, high=1, doc="share of the slots that may be protected")}

PROBATION, PROTECTED = 1, 2


class State(NamedTuple):
    queues: Queues
    most: int  # protected keys


def init(geometry, slots, params):
    return State(new_queues(geometry.keys, 2), int(slots * params["protected"]))


def on_hit(state, cache, group, key):
    promote(state.queues, group, key, PROBATION, PROTECTED, state.most)


def victim(state, cache, group, key):
    chosen = oldest_absent(state.queues, cache, group, PROBATION)
    if chosen < 0:
        chosen = oldest_absent(state.queues, cache, group, PROTECTED)
    return chosen


def on_evict(state, cache, group, key):
    put(state.queues, group, key, NOWHERE)


def on_insert(state, cache, group, key):
    put(state.queues, group, key, PROBATION)
