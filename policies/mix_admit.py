"""`mix` with admission: a newcomer is given a slot only if its value beats the victim's by a
margin; otherwise the miss is declined (streamed, or served by the CPU).

Values as in `mix`: logarithms of expected use, less half a unit for a layer that comes again last,
so the newcomer, whose layer has just been served, starts half a unit down. A margin of 0.1 asks for
about 10 % more expected use. Empty slots are always filled. Needs an engine that can decline.
"""

from typing import NamedTuple

from simlab.policy.lowest import left
from simlab.policy.mixture import Mixture, mix_value, mix_victim, mix_visit, new_mixture
from simlab.policy.protocol import Param

NAME = "mix-admit"
VERSION = 1
SOURCE = "simlab; decayed counts: LRFU, Lee et al. 2001"
PARAMS = {
    "margin": Param(0.1, low=-100, high=100, doc="by how much the newcomer's value must be higher")
}
DECLINES = True

HALF_LIVES = (1.0, 4.0, 16.0, 64.0)


class State(NamedTuple):
    mixture: Mixture
    margin: float


def init(geometry, slots, params):
    mixture = new_mixture(geometry.keys, geometry.layers, HALF_LIVES)
    return State(mixture, params["margin"])


def on_set(state, cache, group, layer, experts):
    mix_visit(state.mixture, group, layer, experts)


def victim(state, cache, group, key):
    return mix_victim(state.mixture, cache, group)


def admit(state, cache, group, key, victim):
    if victim < 0:
        return True
    gain = mix_value(state.mixture, group, key) - mix_value(state.mixture, group, victim)
    return gain >= state.margin


def on_evict(state, cache, group, key):
    left(state.mixture.lowest, group, key)
