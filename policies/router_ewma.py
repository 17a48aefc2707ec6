"""Router weights, averaged: the key with the lowest exponentially weighted mean of its router
weights leaves.

At each visit of a layer every key's mean becomes 2^(-1/h) x mean + (1 - 2^(-1/h)) x weight, the
weight being what the router gave the key in this set (0 if not picked, summed over the tokens of
the step). Kept for all keys, resident or not. Present members stay; ties: lowest layer, then lowest
expert. Needs a trace with router weights.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.lowest import Lowest, left, lowest_of_all, new_lowest, visit
from simlab.policy.protocol import Param

NAME = "router-ewma"
VERSION = 1
SOURCE = "simlab; router scores as cache priorities: HybriMoE, arXiv 2504.05897 (2025)"
PARAMS = {"half_life": Param(8.0, low=0.01, high=1e9, doc="visits after which a weight is halved")}
NEEDS = ("weights",)


class State(NamedTuple):
    mean: npt.NDArray[np.float64]  # [keys]
    lowest: Lowest
    decay: float


def init(geometry, slots, params):
    return State(
        mean=np.zeros(geometry.keys),
        lowest=new_lowest(geometry.layers),
        decay=2.0 ** (-1.0 / params["half_life"]),
    )


def on_set(state, cache, group, layer, experts):
    visit(state.lowest, layer)
    base = layer * group.experts
    for key in range(base, base + group.experts):
        state.mean[key] *= state.decay
    for expert in experts:
        state.mean[base + expert] += (1.0 - state.decay) * cache.weight[base + expert]


def victim(state, cache, group, key):
    return lowest_of_all(state.lowest, cache, group, state.mean)


def on_evict(state, cache, group, key):
    left(state.lowest, group, key)
