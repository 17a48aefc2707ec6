"""2Q, the full version: newcomers wait in a FIFO (A1in); those that leave it are remembered
(A1out), and who is asked for again while remembered goes to an LRU list (Am).

While A1in is longer than its share its oldest key leaves, else the least recent of Am. Hits in A1in
change nothing. Present members are passed over; if the preferred list has no other, the victim
comes from the other list.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.protocol import Param
from simlab.policy.queues import NOWHERE, Queues, new_queues, oldest, oldest_absent, put

NAME = "twoq"
VERSION = 1
SOURCE = "Johnson & Shasha 1994, 2Q: a low overhead high performance buffer management algorithm"
PARAMS = {
    "in_share": Param(0.25, low=0, high=1, doc="share of the slots for A1in (Kin)"),
    "out_share": Param(0.5, low=0, high=100, doc="remembered keys as a share of the slots (Kout)"),
}

A1IN, A1OUT, AM = 1, 2, 3


class State(NamedTuple):
    queues: Queues
    returning: npt.NDArray[np.bool_]  # [1], the missing key is remembered
    most_in: int
    most_out: int


def init(geometry, slots, params):
    return State(
        queues=new_queues(geometry.keys, 3),
        returning=np.zeros(1, np.bool_),
        most_in=int(slots * params["in_share"]),
        most_out=int(slots * params["out_share"]),
    )


def on_hit(state, cache, group, key):
    if state.queues.where[key] == AM:
        put(state.queues, group, key, AM)


def on_miss(state, cache, group, key):
    state.returning[0] = state.queues.where[key] == A1OUT


def victim(state, cache, group, key):
    first, second = AM, A1IN
    if state.queues.size[A1IN] > state.most_in:
        first, second = A1IN, AM
    chosen = oldest_absent(state.queues, cache, group, first)
    if chosen < 0:
        chosen = oldest_absent(state.queues, cache, group, second)
    return chosen


def on_evict(state, cache, group, key):
    queues = state.queues
    put(queues, group, key, A1OUT if queues.where[key] == A1IN else NOWHERE)
    while queues.size[A1OUT] > state.most_out:
        put(queues, group, oldest(queues, group, A1OUT), NOWHERE)


def on_insert(state, cache, group, key):
    put(state.queues, group, key, AM if state.returning[0] else A1IN)
