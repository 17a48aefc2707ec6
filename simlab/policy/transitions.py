"""What a layer's experts of this token say about its next tokens: the block of `mix-tr` and
`mix-trace`.

Two things are learned online, per layer: how often an expert is picked, P(e), and how often it is
picked after another, P(e next | i), from an experts x experts table with PSEUDO pseudo-counts of
P(e). The value of a key is that of the decayed counts (mixture.py) plus `lift` times the mean, over
the experts i of its layer's last set, of ln(P(e next | i) / P(e)).

Two logarithms for every resident key of every visit would be most of the work. So all values of a
layer are first found nearly, in vector operations and with a known error; only where two keys are
too close to tell are theirs found exactly. Who leaves is always who has the lowest exact value.

An expert may leave a trace, as in temporal-difference learning (Sutton 1988): it then vouches not
only for the next set but, with a weight that is halved every so many visits, for later ones.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit
from simlab.policy.lowest import from_order, in_order, next_stale
from simlab.policy.mixture import FLOOR, Mixture, mix_visit, new_mixture

PSEUDO = 8.0
FAINT = 1e-12  # a trace below this is none: no arithmetic with denormal numbers
CHUNK = 8  # factors multiplied before a logarithm is taken: few logarithms, no overflow

CURVE_0, CURVE_1, CURVE_2 = 0.43872574763838595, -0.23905826507828878, 0.0821307174208272
LN_2 = math.log(2.0)
NEAR = 8e-5  # most by which near_log is off (7.85e-5), with room for all rounding
IDS = np.int64(0xFFFF)  # the bits of a value that give way to the expert's id: 2^-36 of it
GONE = np.int64(np.float64(np.inf).view(np.int64))  # the value, in order, of who may not leave


class Transitions(NamedTuple):
    """``last``: uint16 [layers, experts], the first ``n_last`` (int64 [layers]) are a layer's last
    set. ``visits``: int64 [layers]; ``picked``: float64 [keys], visits that picked the key.
    ``trace``: float64 [keys], what a key vouches with; ``left_from``: float64 [keys], sum of its
    traces over the visits; ``follows``: float64 [keys, experts], of those, for each expert after
    it, over the visits that picked that one. ``expected``: float64 [layers], mean of
    ln(left_from + PSEUDO) over the last set. ``memory``: what is left of a trace after a visit;
    ``everyone``: uint16 [experts], 0, 1, ... ``lift``: weight of the mean log lift.

    Nearly: ``near``: float64 [keys], values as of visit ``scored``: int64 [layers]; two are too
    close to tell within ``margin``. ``shown``: int64 [keys], the same in order, with the expert's
    id in the lowest bits, GONE if it may not leave; ``rivals``: int64 [layers], how many are too
    close to the lowest to tell. ``rarity``, ``told``: float64 [experts], scratch.
    """

    mixture: Mixture
    last: npt.NDArray[np.uint16]
    n_last: npt.NDArray[np.int64]
    visits: npt.NDArray[np.int64]
    picked: npt.NDArray[np.float64]
    trace: npt.NDArray[np.float64]
    left_from: npt.NDArray[np.float64]
    follows: npt.NDArray[np.float64]
    expected: npt.NDArray[np.float64]
    memory: float
    everyone: npt.NDArray[np.uint16]
    lift: float
    near: npt.NDArray[np.float64]
    scored: npt.NDArray[np.int64]
    margin: float
    shown: npt.NDArray[np.int64]
    rivals: npt.NDArray[np.int64]
    rarity: npt.NDArray[np.float64]
    told: npt.NDArray[np.float64]


def new_transitions(
    layers: int,
    experts: int,
    half_lives: tuple[float, float, float, float],
    *,
    lift: float,
    memory: float = 0.0,
) -> Transitions:
    """Nothing picked yet; without ``memory`` an expert vouches for the next set only."""
    keys = layers * experts
    return Transitions(
        mixture=new_mixture(keys, layers, half_lives),
        last=np.zeros((layers, experts), np.uint16),
        n_last=np.zeros(layers, np.int64),
        visits=np.zeros(layers, np.int64),
        picked=np.zeros(keys),
        trace=np.zeros(keys),
        left_from=np.zeros(keys),
        follows=np.zeros((keys, experts)),
        expected=np.zeros(layers),
        memory=memory,
        everyone=np.arange(experts, dtype=np.uint16),
        lift=lift,
        near=np.full(keys, math.log(FLOOR)),  # of a layer that was not visited yet
        scored=np.zeros(layers, np.int64),
        margin=2.0 * NEAR * (1.0 + lift),
        shown=np.full(keys, GONE),
        rivals=np.zeros(layers, np.int64),
        rarity=np.zeros(experts),
        told=np.zeros(experts),
    )


@kernel_jit
def learn_visit(learned: Any, group: Any, layer: int, experts: Any) -> None:
    """A layer is visited."""
    mix_visit(learned.mixture, group, layer, experts)
    base = layer * group.experts
    end = base + group.experts
    trace, left_from = learned.trace[base:end], learned.left_from[base:end]
    for before in range(group.experts):
        left_from[before] += trace[before]
    # without memory only the last set has left a trace
    everyone = learned.memory > 0.0
    last = learned.last[layer, 0 : learned.n_last[layer]]
    for before in learned.everyone[:] if everyone else last:
        vouch = trace[before]
        if vouch > 0.0:
            follows = learned.follows[np.uint32(base + before), 0 : group.experts]
            for expert in experts:
                follows[expert] += vouch
    for before in range(group.experts):
        faded = trace[before] * learned.memory
        trace[before] = faded if faded > FAINT else 0.0
    learned.visits[layer] += 1
    n = experts.shape[0]
    learned.n_last[layer] = n
    total = 0.0
    chances = 1.0
    for i in range(n):
        trace[experts[i]] += 1.0
        learned.picked[base + experts[i]] += 1.0
        learned.last[layer, i] = experts[i]
        chances *= left_from[experts[i]] + PSEUDO
        if i % CHUNK == CHUNK - 1:
            total += math.log(chances)
            chances = 1.0
    learned.expected[layer] = (total + math.log(chances)) / n


@kernel_jit
def mean_log_lift(learned: Any, group: Any, layer: int, expert: int) -> Any:
    """Mean log lift of an expert that was picked before, given its layer's last set."""
    base = layer * group.experts
    key = base + expert
    if learned.picked[key] == 0.0:  # resident from the start (sglang), not picked yet
        return 0.0
    rarity = learned.visits[layer] / learned.picked[key]  # 1 / P(e)
    total = 0.0
    told = 1.0
    n = learned.n_last[layer]
    for i in range(n):
        told *= learned.follows[base + learned.last[layer, i], expert] * rarity + PSEUDO
        if i % CHUNK == CHUNK - 1:
            total += math.log(told)
            told = 1.0
    return (total + math.log(told)) / n - learned.expected[layer]


@kernel_jit
def near_log(x: float) -> Any:
    """ln(x) within 7.85e-5, x positive and not denormal, in what a loop can do on vectors.

    The bits of x, read as a number, are its logarithm to base 2 but for the curve between two
    powers of 2, log2(1 + f) - f, here a polynomial with the least greatest error.
    """
    bits = np.float64(x).view(np.uint64)
    # a number of less than 52 bits under the exponent of 2^52 is 2^52 + that number
    straight = np.uint64(bits >> np.uint64(12) | np.uint64(0x4330000000000000)).view(np.float64)
    mantissa = np.uint64(bits & np.uint64(0x000FFFFFFFFFFFFF) | np.uint64(0x3FF0000000000000))
    f = mantissa.view(np.float64) - 1.0
    curve = f * (1.0 - f) * (CURVE_0 + f * (CURVE_1 + f * CURVE_2))
    return ((straight - 2.0**52) * 2.0**-40 - 1023.0 + curve) * LN_2


@kernel_jit
def _score_nearly(learned: Any, group: Any, layer: int) -> None:
    """Find the values of all experts of a layer to within half the margin."""
    base = layer * group.experts
    end = base + group.experts
    n = learned.n_last[layer]
    last = learned.last[layer, 0:n]
    picked, near = learned.picked[base:end], learned.near[base:end]
    rarity, told = learned.rarity[:], learned.told[:]
    visits = np.float64(learned.visits[layer])
    # simple loops, so that they become vector operations; hence np.divide: `/` may raise
    for expert in range(group.experts):
        rarity[expert] = np.divide(visits, max(picked[expert], 1.0))
        near[expert] = 0.0
    for first in range(0, n, CHUNK):
        for expert in range(group.experts):
            told[expert] = 1.0
        for i in range(first, min(first + CHUNK, n)):
            follows = learned.follows[np.uint32(base + last[i]), 0 : group.experts]
            for expert in range(group.experts):
                told[expert] *= follows[expert] * rarity[expert] + PSEUDO
        for expert in range(group.experts):
            near[expert] += near_log(told[expert])
    weight = learned.lift / n
    less = learned.lift * learned.expected[layer]
    mean = learned.mixture.mean[base:end]
    for expert in range(group.experts):
        lift = near[expert] * weight - less
        lift = lift if picked[expert] > 0.0 else 0.0
        near[expert] = near_log(mean[expert]) + lift


@kernel_jit
def _look(learned: Any, cache: Any, group: Any, layer: int) -> None:
    """Find, nearly, the lowest key of a layer that may leave, its value, and its rivals."""
    if learned.scored[layer] != learned.visits[layer]:
        _score_nearly(learned, group, layer)
        learned.scored[layer] = learned.visits[layer]
    base = np.int64(layer) * group.experts
    end = base + group.experts
    near, slots = learned.near[base:end], cache.slot_of[base:end]
    stamps, now = cache.stamp[base:end], cache.now[0]
    shown = learned.shown[base:end]
    least = GONE
    for expert in range(group.experts):
        value = in_order(near[expert]) & ~IDS | np.int64(expert)
        value = value if slots[expert] >= 0 else GONE
        value = value if stamps[expert] != now else GONE
        shown[expert] = value
        least = min(least, value)
    lowest = from_order(least)
    rivals = 0
    if least != GONE:
        limit = in_order(lowest + learned.margin)
        for expert in range(group.experts):
            rivals += 1 if shown[expert] <= limit else 0
    learned.rivals[layer] = rivals  # itself included
    learned.mixture.value[layer] = lowest
    learned.mixture.lowest.key[layer] = base + (least & IDS) if rivals > 0 else -1


@kernel_jit
def _settle(learned: Any, group: Any, layer: int) -> float:
    """The lowest value of a layer's rivals, exactly; its key becomes the layer's lowest."""
    base = layer * group.experts
    limit = in_order(learned.mixture.value[layer] + learned.margin)
    lowest = np.inf
    for expert in range(group.experts):
        key = base + expert
        if learned.shown[key] <= limit:
            lift = mean_log_lift(learned, group, layer, expert)
            value = math.log(learned.mixture.mean[key]) + learned.lift * lift
            if value < lowest:
                lowest = value
                learned.mixture.lowest.key[layer] = key
    return lowest


@kernel_jit
def least_vouched_for(learned: Any, cache: Any, group: Any) -> Any:
    """The resident key outside the present set with the lowest value - 0.5 d / L, or -1. Ties: the
    lowest layer, then the lowest expert id.
    """
    lowest = learned.mixture.lowest
    layer = next_stale(lowest, cache)
    while layer >= 0:
        _look(learned, cache, group, layer)
        layer = next_stale(lowest, cache)
    begin = group.layers - 1 - lowest.current[0]
    values, ahead = learned.mixture.value[:], learned.mixture.ahead[begin : begin + group.layers]
    least = in_order(values[0] - ahead[0])
    for layer in range(1, group.layers):
        least = min(least, in_order(values[layer] - ahead[layer]))
    limit = from_order(least) + learned.margin
    rivals = 0
    best = 0
    for layer in range(group.layers):
        if values[layer] - ahead[layer] <= limit:
            rivals += learned.rivals[layer]
            best = layer
    if rivals > 1:
        settled = np.inf
        for layer in range(group.layers):
            if values[layer] - ahead[layer] <= limit:
                value = _settle(learned, group, layer) - ahead[layer]
                if value < settled:
                    settled = value
                    best = layer
    return np.int64(lowest.key[best])  # -1 if nothing may leave
