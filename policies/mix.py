"""A mix of decayed counts at four half-lives, counted per visit of a key's own layer.

At each visit of a layer all its keys decay and the picked ones gain 1 - 2^(-1/h), for h = 1, 4, 16
and 64 visits; value = ln(mean of the four + 1e-9) - 0.5 d / L, where d is the number of visits
until the key's layer comes again (1..L). The lowest value leaves. The last term mends LRU's order
inside the layer cycle: among equals, who is needed last goes first. No training, no knowledge of
the future.
"""

from typing import NamedTuple

from simlab.policy.lowest import left
from simlab.policy.mixture import Mixture, mix_victim, mix_visit, new_mixture

NAME = "mix"
VERSION = 1
SOURCE = "simlab; decayed counts: LRFU, Lee et al. 2001"

HALF_LIVES = (1.0, 4.0, 16.0, 64.0)


class State(NamedTuple):
    mixture: Mixture


def init(geometry, slots, params):
    return State(new_mixture(geometry.keys, geometry.layers, HALF_LIVES))


def on_set(state, cache, group, layer, experts):
    mix_visit(state.mixture, group, layer, experts)


def victim(state, cache, group, key):
    return mix_victim(state.mixture, cache, group)


def on_evict(state, cache, group, key):
    left(state.mixture.lowest, group, key)
