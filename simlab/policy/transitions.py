"""What a layer's experts of this token say about its next tokens: the block of `mix-tr` and
`mix-trace`.

Two things are learned online, per layer: how often an expert is picked, P(e), and how often it is
picked after another, P(e next | i), from an experts x experts table with PSEUDO pseudo-counts of
P(e). The value of a key is that of the decayed counts (mixture.py) plus `lift` times the mean, over
the experts i of its layer's last set, of ln(P(e next | i) / P(e)).

An expert may leave a trace, as in temporal-difference learning (Sutton 1988): it then vouches not
only for the next set but, with a weight that is halved every so many visits, for later ones.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit
from simlab.policy.lowest import lowest_in_layer, next_stale
from simlab.policy.mixture import Mixture, lowest_in_cycle, mix_visit, new_mixture

PSEUDO = 8.0
FAINT = 1e-12  # a trace below this is none: no arithmetic with denormal numbers
CHUNK = 8  # factors multiplied before a logarithm is taken: few logarithms, no overflow


class Transitions(NamedTuple):
    """``score``: float64 [keys], of the keys that are scored; ``scored``: int64 [keys], the visit
    of its layer at which a key was. ``last``: uint16 [layers, experts], the first ``n_last`` (int64
    [layers]) are the layer's last set. ``visits``: int64 [layers]; ``picked``: int64 [keys], visits
    that picked the key. ``trace``: float64 [keys], what a key vouches with; ``left_from``: float64
    [keys], sum of its traces over the visits; ``follows``: float64 [keys, experts], of those, over
    the visits that picked the key, for each expert before it. ``expected``: float64 [layers], mean
    of ln(left_from + PSEUDO) over the last set. ``memory``: what is left of a trace
    after a visit. ``lift``: weight of the mean log lift.
    """

    mixture: Mixture
    score: npt.NDArray[np.float64]
    scored: npt.NDArray[np.int64]
    last: npt.NDArray[np.uint16]
    n_last: npt.NDArray[np.int64]
    visits: npt.NDArray[np.int64]
    picked: npt.NDArray[np.int64]
    trace: npt.NDArray[np.float64]
    left_from: npt.NDArray[np.float64]
    follows: npt.NDArray[np.float64]
    expected: npt.NDArray[np.float64]
    memory: float
    lift: float


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
        score=np.zeros(keys),
        scored=np.full(keys, -1, np.int64),
        last=np.zeros((layers, experts), np.uint16),
        n_last=np.zeros(layers, np.int64),
        visits=np.zeros(layers, np.int64),
        picked=np.zeros(keys, np.int64),
        trace=np.zeros(keys),
        left_from=np.zeros(keys),
        follows=np.zeros((keys, experts)),
        expected=np.zeros(layers),
        memory=memory,
        lift=lift,
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
    for expert in experts:
        follows = learned.follows[base + expert, 0 : group.experts]
        for before in range(group.experts):
            follows[before] += trace[before]
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
        learned.picked[base + experts[i]] += 1
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
    if learned.picked[key] == 0:  # resident from the start (sglang), not picked yet
        return 0.0
    rarity = learned.visits[layer] / learned.picked[key]  # 1 / P(e)
    total = 0.0
    told = 1.0
    n = learned.n_last[layer]
    for i in range(n):
        told *= learned.follows[key, learned.last[layer, i]] * rarity + PSEUDO
        if i % CHUNK == CHUNK - 1:
            total += math.log(told)
            told = 1.0
    return (total + math.log(told)) / n - learned.expected[layer]


@kernel_jit
def _score_residents(learned: Any, cache: Any, group: Any, layer: int) -> None:
    """Score the keys of a layer that may leave, once a visit of the layer."""
    base = layer * group.experts
    for expert in range(group.experts):
        key = base + expert
        if (
            cache.slot_of[key] >= 0
            and cache.stamp[key] != cache.now[0]
            and learned.scored[key] != learned.visits[layer]
        ):
            told = mean_log_lift(learned, group, layer, expert)
            learned.score[key] = math.log(learned.mixture.mean[key]) + learned.lift * told
            learned.scored[key] = learned.visits[layer]


@kernel_jit
def least_vouched_for(learned: Any, cache: Any, group: Any) -> Any:
    """The resident key outside the present set with the lowest value - 0.5 d / L, or -1."""
    lowest = learned.mixture.lowest
    layer = next_stale(lowest, cache)
    while layer >= 0:
        _score_residents(learned, cache, group, layer)
        chosen = lowest_in_layer(cache, group, layer, learned.score)
        lowest.key[layer] = chosen
        learned.mixture.value[layer] = learned.score[chosen] if chosen >= 0 else np.inf
        layer = next_stale(lowest, cache)
    return lowest_in_cycle(learned.mixture, group)
