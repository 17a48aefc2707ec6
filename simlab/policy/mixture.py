"""A mixture of decayed counts per visit of a key's own layer: the block of the `mix` policies.

At each visit of a layer all its keys decay and the picked ones gain 1 - 2^(-1/h), for four
half-lives h in visits; the mean of the four estimates how often the key will be picked.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.cycle import visits_ahead
from simlab.policy.jit import kernel_jit
from simlab.policy.lowest import (
    Lowest,
    in_order,
    lowest_in_layer,
    new_lowest,
    next_stale,
    visit,
)

FLOOR = 1e-9
CYCLE_WEIGHT = 0.5


class Mixture(NamedTuple):
    """``counts``: float64 [4, keys]; ``mean``: float64 [keys], mean of the four + FLOOR; ``decay``:
    float64 [4]; ``lowest``, ``value``: float64 [layers], the layer's lowest key and its value, inf
    without one; ``ahead``: float64 [2 layers], what d visits until a layer comes again take off,
    for d = 1..L and again, so that layers 0, 1, ... find theirs in a row.
    """

    counts: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    decay: npt.NDArray[np.float64]
    lowest: Lowest
    value: npt.NDArray[np.float64]
    ahead: npt.NDArray[np.float64]


def new_mixture(
    n_keys: int, n_layers: int, half_lives: tuple[float, float, float, float]
) -> Mixture:
    """No key picked yet."""
    return Mixture(
        counts=np.zeros((4, n_keys)),
        mean=np.full(n_keys, FLOOR),
        decay=np.array([2.0 ** (-1.0 / h) for h in half_lives]),
        lowest=new_lowest(n_layers),
        value=np.full(n_layers, np.inf),
        ahead=CYCLE_WEIGHT * np.tile(np.arange(1, n_layers + 1), 2) / n_layers,
    )


@kernel_jit
def mix_visit(mixture: Any, group: Any, layer: int, experts: Any) -> None:
    """A layer is visited."""
    visit(mixture.lowest, layer)
    base = layer * group.experts
    end = base + group.experts
    # slices from 0, one simple loop after the other: so they become vector operations
    for i in range(4):
        decay = mixture.decay[i]
        count = mixture.counts[i, base:end]
        for expert in range(group.experts):
            count[expert] *= decay
        for expert in experts:
            count[expert] += 1.0 - decay
    c0, c1 = mixture.counts[0, base:end], mixture.counts[1, base:end]
    c2, c3 = mixture.counts[2, base:end], mixture.counts[3, base:end]
    mean = mixture.mean[base:end]
    for expert in range(group.experts):
        mean[expert] = (c0[expert] + c1[expert] + c2[expert] + c3[expert]) * 0.25 + FLOOR


@kernel_jit
def lowest_in_cycle(mixture: Any, group: Any) -> Any:
    """Among the layers' lowest keys the one of the lowest value - 0.5 d / L, d = visits until its
    layer comes again, or -1. Ties: the lowest layer.
    """
    begin = group.layers - 1 - mixture.lowest.current[0]
    values, ahead = mixture.value[:], mixture.ahead[begin : begin + group.layers]
    least = in_order(values[0] - ahead[0])
    for layer in range(1, group.layers):
        least = min(least, in_order(values[layer] - ahead[layer]))
    best = 0
    while in_order(values[best] - ahead[best]) != least:
        best += 1
    return np.int64(mixture.lowest.key[best])  # -1 if it holds nothing that may leave


@kernel_jit
def mix_victim(mixture: Any, cache: Any, group: Any) -> Any:
    """The resident key outside the present set with the lowest ln(mean) - 0.5 d / L."""
    layer = next_stale(mixture.lowest, cache)
    while layer >= 0:
        key = lowest_in_layer(cache, group, layer, mixture.mean)
        mixture.lowest.key[layer] = key
        mixture.value[layer] = math.log(mixture.mean[key]) if key >= 0 else np.inf
        layer = next_stale(mixture.lowest, cache)
    return lowest_in_cycle(mixture, group)


@kernel_jit
def mix_value(mixture: Any, group: Any, key: int) -> Any:
    """What mix_victim minimises, of any key."""
    layer = np.int64(key) // group.experts
    ahead = visits_ahead(layer, mixture.lowest.current[0], group.layers)
    return math.log(mixture.mean[key]) - mixture.ahead[ahead - 1]
