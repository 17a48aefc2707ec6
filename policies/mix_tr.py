"""`mix` with transitions: what a layer's experts of this token say about its next token.

Half-lives 2, 8, 32 and 128 visits, and the value of a key gains the mean over the experts i of its
layer's last set of ln(P(e next | i) / P(e)), times `lift`, learned online: P(e) is the share of the
layer's visits that picked e, P(e next | i) the share of visits after one with i that picked e, with
8 pseudo-counts of P(e). An experts x experts table a layer; only resident keys are scored, and only
when a victim is asked for. The lowest value leaves; present members stay. No offline training.
"""

from simlab.policy.lowest import left
from simlab.policy.protocol import Param
from simlab.policy.transitions import learn_visit, least_vouched_for, new_transitions

NAME = "mix-tr"
VERSION = 1
SOURCE = "simlab; decayed counts: LRFU, Lee et al. 2001"

HALF_LIVES = (2.0, 8.0, 32.0, 128.0)
PARAMS = {"lift": Param(0.7, low=0, high=100, doc="weight of the mean log lift")}


def init(geometry, slots, params):
    return new_transitions(geometry.layers, geometry.experts, HALF_LIVES, lift=params["lift"])


def on_set(state, cache, group, layer, experts):
    learn_visit(state, group, layer, experts)


def victim(state, cache, group, key):
    return least_vouched_for(state, cache, group)


def on_evict(state, cache, group, key):
    left(state.mixture.lowest, group, key)
