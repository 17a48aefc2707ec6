"""Static hot set, an oracle over the trace: the most used keys of the whole run fill the slots at
their first miss and stay for ever; every other miss is declined.

What the best fixed choice of experts would give: it knows the uses of the run it is judged on
(cached path; ties: lowest layer, then lowest expert), so it is a reference, not a policy an engine
could run. Present members are never evicted; nothing is (under ``bmoe`` the least recent, should
the budget be exceeded).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.linked import Lists, first_absent, new_lists, push_back, unlink

NAME = "static-hot"
VERSION = 1
SOURCE = "simlab; static placement of popular experts: Fiddler, arXiv 2402.07033 (2024)"
NEEDS = ("uses",)
BOUND = True
DECLINES = True


class State(NamedTuple):
    arrival: Lists
    hot: npt.NDArray[np.bool_]  # [keys]


def init(geometry, slots, params):
    hot = np.zeros(geometry.keys, np.bool_)
    hot[np.argsort(-geometry.uses, kind="stable")[:slots]] = True
    return State(new_lists(geometry.keys, 1), hot & (geometry.uses > 0))


def victim(state, cache, group, key):
    return first_absent(state.arrival, cache, group.keys, group.keys)


def admit(state, cache, group, key, victim):
    return victim < 0 and state.hot[key]


def on_evict(state, cache, group, key):
    unlink(state.arrival, key)


def on_insert(state, cache, group, key):
    push_back(state.arrival, group.keys, key)
