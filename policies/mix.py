"""A mix of decayed counts at four half-lives, counted per visit of a key's own layer.

At each visit of a layer all its keys decay and the picked ones gain 1 - 2^(-1/h), for h = 1, 4, 16
and 64 visits; value = ln(mean of the four + 1e-9) - 0.5 d / L, where d is the number of visits
until the key's layer comes again (1..L). The lowest value leaves. The last term mends LRU's order
inside the layer cycle: among equals, who is needed last goes first. No training, no knowledge of
the future.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.lowest import Lowest, left, new_lowest, refresh, visit

NAME = "mix"
VERSION = 1
SOURCE = "simlab; decayed counts: LRFU, Lee et al. 2001"

HALF_LIVES = (1.0, 4.0, 16.0, 64.0)
FLOOR = 1e-9
CYCLE_WEIGHT = 0.5


class State(NamedTuple):
    count: npt.NDArray[np.float64]  # [4, keys]
    mean: npt.NDArray[np.float64]  # [keys], mean of the four counts + FLOOR
    decay: npt.NDArray[np.float64]  # [4]
    lowest: Lowest
    value: npt.NDArray[np.float64]  # [layers], ln(mean) of the layer's lowest key


def init(geometry, slots, params):
    return State(
        count=np.zeros((len(HALF_LIVES), geometry.keys)),
        mean=np.full(geometry.keys, FLOOR),
        decay=np.array([2.0 ** (-1.0 / h) for h in HALF_LIVES]),
        lowest=new_lowest(geometry.layers),
        value=np.zeros(geometry.layers),
    )


def on_set(state, cache, group, layer, experts):
    visit(state.lowest, layer)
    base = layer * group.experts
    for i in range(state.decay.shape[0]):
        decay = state.decay[i]
        for key in range(base, base + group.experts):
            state.count[i, key] *= decay
        for j in range(experts.shape[0]):
            state.count[i, base + experts[j]] += 1.0 - decay
    for key in range(base, base + group.experts):
        total = (
            state.count[0, key] + state.count[1, key] + state.count[2, key] + state.count[3, key]
        )
        state.mean[key] = total * 0.25 + FLOOR


def victim(state, cache, group, key):
    best = -1
    least = np.inf
    for layer in range(group.layers):
        if refresh(state.lowest, cache, group, layer, state.mean) and state.lowest.key[layer] >= 0:
            state.value[layer] = math.log(state.mean[state.lowest.key[layer]])
        if state.lowest.key[layer] < 0:
            continue
        distance = (layer - state.lowest.current[0]) % group.layers
        if distance == 0:
            distance = group.layers
        value = state.value[layer] - CYCLE_WEIGHT * distance / group.layers
        if value < least:
            least = value
            best = state.lowest.key[layer]
    return best


def on_evict(state, cache, group, key):
    left(state.lowest, group, key)
