"""LeCaR: two experts, LRU and LFU, and weights learned from regret.

At a miss on a full pool one of the two is drawn by weight and names the victim, which is remembered
in that expert's history; a miss on a remembered key after t lookups multiplies the other expert's
weight by exp(learning_rate x 0.005^(t / slots)). Use counts start anew with each upload (the
paper's text leaves it open). Present members are passed over by both. Seeded by --seed.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.counts import (
    Counts,
    count_up,
    least_counted,
    new_counts,
    start_count,
    stop_count,
)
from simlab.policy.linked import Lists, first_absent, move_back, new_lists, push_back, unlink
from simlab.policy.protocol import Param
from simlab.policy.queues import NOWHERE, Queues, enter, leave, new_queues, oldest
from simlab.policy.sampling import uniform

NAME = "lecar"
VERSION = 1
SOURCE = "Vietri et al. 2018, Driving cache replacement with ML-based LeCaR (HotStorage)"
PARAMS = {
    "learning_rate": Param(0.45, low=0, high=10, doc="lambda: how strongly regret counts"),
    "history": Param(0.5, low=0, high=100, doc="length of each history as a share of the slots"),
}

BY_LRU, BY_LFU = 1, 2  # histories
DISCOUNT = 0.005


class State(NamedTuple):
    recency: Lists
    counts: Counts
    history: Queues
    gone: npt.NDArray[np.uint32]  # [keys], time of the eviction
    clock: npt.NDArray[np.uint32]  # [1], lookups, modulo 2**32
    weight: npt.NDArray[np.float64]  # [1], of LRU; LFU has the rest
    chosen: npt.NDArray[np.int64]  # [1], who named the last victim
    generator: npt.NDArray[np.uint64]  # [1]
    growth: npt.NDArray[np.float64]  # [lookups since an eviction], 0 where not asked yet
    learning_rate: float
    rate: float  # ln of the discount of one lookup
    most: int  # remembered keys of a history


def init(geometry, slots, params):
    return State(
        recency=new_lists(geometry.keys, 1),
        counts=new_counts(geometry.keys),
        history=new_queues(geometry.keys, 2),
        gone=np.zeros(geometry.keys, np.uint32),
        clock=np.zeros(1, np.uint32),
        weight=np.array([0.5]),
        chosen=np.zeros(1, np.int64),
        generator=np.array([geometry.seed % 2**64], np.uint64),
        growth=np.zeros(4 * max(slots, 1)),
        learning_rate=params["learning_rate"],
        rate=math.log(DISCOUNT) / max(slots, 1),
        most=int(slots * params["history"]),
    )


def _growth(state, age):
    """Of a weight, by regret for an eviction so long ago; looked up after the first time."""
    known = state.growth
    if age < len(known) and known[age] > 0:
        return known[age]
    growth = math.exp(state.learning_rate * math.exp(age * state.rate))
    if age < len(known):
        known[age] = growth
    return growth


def on_hit(state, cache, group, key):
    state.clock[0] += 1
    move_back(state.recency, group.keys, key)
    count_up(state.counts, group, key)


def on_miss(state, cache, group, key):
    state.clock[0] += 1
    by = state.history.where[key]
    if by == NOWHERE:
        return
    growth = _growth(state, np.uint32(state.clock[0] - state.gone[key]))
    lru, lfu = state.weight[0], 1.0 - state.weight[0]
    if by == BY_LRU:
        lfu *= growth
    else:
        lru *= growth
    state.weight[0] = lru / (lru + lfu)
    leave(state.history, key, by)


def victim(state, cache, group, key):
    if uniform(state.generator) < state.weight[0]:
        state.chosen[0] = BY_LRU
        return first_absent(state.recency, cache, group.keys, group.keys)
    state.chosen[0] = BY_LFU
    return least_counted(state.counts, cache, group)


def on_evict(state, cache, group, key):
    unlink(state.recency, key)
    stop_count(state.counts, group, key)
    by = state.chosen[0]
    state.gone[key] = state.clock[0]
    enter(state.history, group, key, by)
    while state.history.size[by] > state.most:
        leave(state.history, oldest(state.history, group, by), by)


def on_insert(state, cache, group, key):
    push_back(state.recency, group.keys, key)
    start_count(state.counts, group, key)
