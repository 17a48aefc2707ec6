"""`mix` with transitions: what a layer's experts of this token say about its next token.

Half-lives 2, 8, 32 and 128 visits, and the value of a key gains the mean over the experts i of its
layer's last set of ln(P(e next | i) / P(e)), times `lift`, learned online: P(e) is the share of the
layer's visits that picked e, P(e next | i) the share of visits after one with i that picked e, with
8 pseudo-counts of P(e). An experts x experts table a layer; only resident keys are scored, and only
when a victim is asked for. The lowest value leaves; present members stay. No offline training.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.lowest import left, lowest_in_layer, next_stale
from simlab.policy.mixture import Mixture, lowest_in_cycle, mix_visit, new_mixture
from simlab.policy.protocol import Param

NAME = "mix-tr"
VERSION = 1
SOURCE = "simlab; decayed counts: LRFU, Lee et al. 2001"

HALF_LIVES = (2.0, 8.0, 32.0, 128.0)
PSEUDO = 8.0
PARAMS = {"lift": Param(0.7, low=0, high=100, doc="weight of the mean log lift")}
CHUNK = 8  # factors multiplied before a logarithm is taken: few logarithms, no overflow


class State(NamedTuple):
    mixture: Mixture
    score: npt.NDArray[np.float64]  # [keys], of the keys that are scored
    scored: npt.NDArray[np.int64]  # [keys], visit of its layer at which a key was scored
    last: npt.NDArray[np.uint16]  # [layers, experts], last set of each layer
    n_last: npt.NDArray[np.int64]  # [layers]
    visits: npt.NDArray[np.int64]  # [layers]
    picked: npt.NDArray[np.int64]  # [keys], visits that picked the key
    left_from: npt.NDArray[np.int64]  # [keys], visits after one that picked the key
    follows: npt.NDArray[np.int32]  # [keys, experts], of those, visits that picked the expert
    lift: float


def init(geometry, slots, params):
    layers, experts, keys = geometry.layers, geometry.experts, geometry.keys
    return State(
        mixture=new_mixture(keys, layers, HALF_LIVES),
        score=np.zeros(keys),
        scored=np.full(keys, -1, np.int64),
        last=np.zeros((layers, experts), np.uint16),
        n_last=np.zeros(layers, np.int64),
        visits=np.zeros(layers, np.int64),
        picked=np.zeros(keys, np.int64),
        left_from=np.zeros(keys, np.int64),
        follows=np.zeros((keys, experts), np.int32),
        lift=params["lift"],
    )


def on_set(state, cache, group, layer, experts):
    mix_visit(state.mixture, group, layer, experts)
    base = layer * group.experts
    for i in range(state.n_last[layer]):
        before = base + state.last[layer, i]
        state.left_from[before] += 1
        for expert in experts:
            state.follows[before, expert] += 1
    state.visits[layer] += 1
    state.n_last[layer] = experts.shape[0]
    for i in range(experts.shape[0]):
        state.picked[base + experts[i]] += 1
        state.last[layer, i] = experts[i]


def mean_log_lift(state, group, layer, expert):
    """Mean log lift of an expert that was picked before, given its layer's last set."""
    base = layer * group.experts
    if state.picked[base + expert] == 0:  # resident from the start (sglang), not picked yet
        return 0.0
    share = state.picked[base + expert] / state.visits[layer]
    prior = PSEUDO * share
    total = 0.0
    told = 1.0
    expected = 1.0
    n = state.n_last[layer]
    for i in range(n):
        before = base + state.last[layer, i]
        told *= state.follows[before, expert] + prior
        expected *= (state.left_from[before] + PSEUDO) * share
        if i % CHUNK == CHUNK - 1:
            total += math.log(told / expected)
            told = 1.0
            expected = 1.0
    return (total + math.log(told / expected)) / n


def score_residents(state, cache, group, layer):
    """Score the keys of a layer that may leave, once a visit of the layer."""
    base = layer * group.experts
    for expert in range(group.experts):
        key = base + expert
        if (
            cache.slot_of[key] >= 0
            and cache.stamp[key] != cache.now[0]
            and state.scored[key] != state.visits[layer]
        ):
            told = mean_log_lift(state, group, layer, expert)
            state.score[key] = math.log(state.mixture.mean[key]) + state.lift * told
            state.scored[key] = state.visits[layer]


def victim(state, cache, group, key):
    lowest = state.mixture.lowest
    layer = next_stale(lowest, cache)
    while layer >= 0:
        score_residents(state, cache, group, layer)
        chosen = lowest_in_layer(cache, group, layer, state.score)
        lowest.key[layer] = chosen
        state.mixture.value[layer] = state.score[chosen] if chosen >= 0 else np.inf
        layer = next_stale(lowest, cache)
    return lowest_in_cycle(state.mixture, group)


def on_evict(state, cache, group, key):
    left(state.mixture.lowest, group, key)
