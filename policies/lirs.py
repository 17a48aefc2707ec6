"""LIRS: keeps the keys whose last two uses lie close together (LIR); all others (HIR) pass through
a short queue Q.

Stack S orders keys by recency down to the least recent LIR key, departed HIR keys included; a HIR
key used again while in S becomes LIR, and the LIR key at the bottom becomes HIR. The first of Q
leaves. Q has a share of the slots, at least k, so that it can hold the newcomers of one set.
Present members of Q are passed over; if there is no other, the lowest LIR key of S that is not
present leaves (it stays in S as a departed key), and the newcomer takes its place as LIR.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.linked import Lists, after, first_absent, new_lists, push_back, unlink
from simlab.policy.protocol import Param

NAME = "lirs"
VERSION = 1
SOURCE = "Jiang & Zhang 2002, LIRS: an efficient low inter-reference recency set policy"
PARAMS = {"hir": Param(0.01, low=0, high=1, doc="share of the slots for resident HIR keys")}

GONE, LIR, HIR = 0, 1, 2


class State(NamedTuple):
    stack: Lists  # S, bottom first
    queue: Lists  # Q, first to leave first
    status: npt.NDArray[np.int8]  # [keys]
    n_lir: npt.NDArray[np.int64]  # [1]
    most_lir: int


def init(geometry, slots, params):
    hir = min(slots, max(geometry.k, int(slots * params["hir"])))
    return State(
        stack=new_lists(geometry.keys, 1),
        queue=new_lists(geometry.keys, 1),
        status=np.zeros(geometry.keys, np.int8),
        n_lir=np.zeros(1, np.int64),
        most_lir=slots - hir,
    )


def to_back(lists, group, key):
    unlink(lists, key)
    push_back(lists, group.keys, key)


def in_list(lists, key):
    return after(lists, key) != key


def prune(state, group):
    """The bottom of S is a LIR key."""
    bottom = after(state.stack, group.keys)
    while bottom < group.keys and state.status[bottom] != LIR:
        unlink(state.stack, bottom)
        bottom = after(state.stack, group.keys)


def make_lir(state, group, key):
    unlink(state.queue, key)
    to_back(state.stack, group, key)
    state.status[key] = LIR
    state.n_lir[0] += 1
    prune(state, group)
    if state.n_lir[0] > state.most_lir:
        bottom = after(state.stack, group.keys)
        unlink(state.stack, bottom)
        push_back(state.queue, group.keys, bottom)
        state.status[bottom] = HIR
        state.n_lir[0] -= 1
        prune(state, group)


def use_hir(state, group, key):
    """A HIR key was used or brought in: LIR if S remembers it, else the end of Q."""
    if in_list(state.stack, key):
        make_lir(state, group, key)
    else:
        push_back(state.stack, group.keys, key)
        to_back(state.queue, group, key)
        prune(state, group)


def on_hit(state, cache, group, key):
    if state.status[key] == LIR:
        to_back(state.stack, group, key)
        prune(state, group)
    else:
        use_hir(state, group, key)


def victim(state, cache, group, key):
    chosen = first_absent(state.queue, cache, group.keys, group.keys)
    if chosen >= 0:
        return chosen
    lowest = np.int64(after(state.stack, group.keys))
    while state.status[lowest] != LIR or cache.stamp[lowest] == cache.now[0]:
        lowest = np.int64(after(state.stack, lowest))
    return lowest


def on_evict(state, cache, group, key):
    if state.status[key] == LIR:
        state.n_lir[0] -= 1
    unlink(state.queue, key)
    state.status[key] = GONE
    prune(state, group)


def on_insert(state, cache, group, key):
    if state.n_lir[0] < state.most_lir:
        make_lir(state, group, key)
    else:
        state.status[key] = HIR
        use_hir(state, group, key)
