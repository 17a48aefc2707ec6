"""LRFU with admission: a newcomer is given a slot only if its sum of faded uses beats the victim's
by a margin; otherwise the miss is declined (streamed, or served by the CPU).

Sums as in `lrfu`. The margin is a natural logarithm: 0.1 asks for about 10 % more. Empty slots are
always filled. Keeps LRU's hit rate at a fraction of its uploads; needs an engine that can decline.
"""

from typing import NamedTuple

from simlab.policy.decayed import HALF_LIFE, Decayed, decayed_uses, new_decayed
from simlab.policy.lowest import left, lowest_of_all
from simlab.policy.protocol import Param

NAME = "lrfu-admit"
VERSION = 1
SOURCE = "simlab; LRFU: Lee et al. 2001"
PARAMS = {
    "half_life": HALF_LIFE,
    "margin": Param(0.1, low=-100, high=100, doc="by how much (ln) the newcomer must score higher"),
}
DECLINES = True


class State(NamedTuple):
    decayed: Decayed
    margin: float


def init(geometry, slots, params):
    decayed = new_decayed(geometry.keys, geometry.layers, params["half_life"])
    return State(decayed, params["margin"])


def on_step(state, cache, group, tokens):
    state.decayed.clock[0] += tokens


def on_set(state, cache, group, layer, experts):
    decayed_uses(state.decayed, group, layer, experts)


def victim(state, cache, group, key):
    return lowest_of_all(state.decayed.lowest, cache, group, state.decayed.rank)


def admit(state, cache, group, key, victim):
    rank = state.decayed.rank
    return victim < 0 or rank[key] >= rank[victim] + state.margin


def on_evict(state, cache, group, key):
    left(state.decayed.lowest, group, key)
