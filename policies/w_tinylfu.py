"""W-TinyLFU: newcomers pass an LRU window; who leaves the window is kept only if it was used more
often lately than who would leave the main part, a segmented LRU (probation and protected).

Uses of all keys are counted exactly up to 15 (keys are few, so no sketch) and halved every 10 x
slots lookups. The loser leaves: nothing is declined, the newcomer always gets a slot. Present
members are passed over; a window of present members only makes the main part give way. The window
of 1 % is the paper's; it should exceed the misses of one layer cycle.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.protocol import Param
from simlab.policy.queues import NOWHERE, Queues, new_queues, oldest, oldest_absent, promote, put

NAME = "w-tinylfu"
VERSION = 1
SOURCE = "Einziger, Friedman & Manes 2017, TinyLFU: a highly efficient cache admission policy"
PARAMS = {
    "window": Param(0.01, low=0, high=1, doc="share of the slots for the window"),
    "protected": Param(0.8, low=0, high=1, doc="share of the main part that may be protected"),
}

WINDOW, PROBATION, PROTECTED = 1, 2, 3
MOST_USES = 15
SAMPLE = 10  # lookups per slot between two halvings


class State(NamedTuple):
    queues: Queues
    uses: npt.NDArray[np.int8]  # [keys]
    counted: npt.NDArray[np.int64]  # [1], lookups since the last halving
    most_window: int
    most_main: int
    most_protected: int


def init(geometry, slots, params):
    window = max(1, int(slots * params["window"]))
    return State(
        queues=new_queues(geometry.keys, 3),
        uses=np.zeros(geometry.keys, np.int8),
        counted=np.zeros(1, np.int64),
        most_window=window,
        most_main=slots - window,
        most_protected=int((slots - window) * params["protected"]),
    )


def on_set(state, cache, group, layer, experts):
    for expert in experts:
        key = layer * group.experts + expert
        state.uses[key] = min(state.uses[key] + 1, MOST_USES)
    state.counted[0] += experts.shape[0]
    if state.counted[0] >= SAMPLE * group.slots:
        state.counted[0] //= 2
        for key in range(group.keys):
            state.uses[key] //= 2


def on_hit(state, cache, group, key):
    if state.queues.where[key] == WINDOW:
        put(state.queues, group, key, WINDOW)
    else:
        promote(state.queues, group, key, PROBATION, PROTECTED, state.most_protected)


def victim(state, cache, group, key):
    leaving = oldest_absent(state.queues, cache, group, WINDOW)
    resident = oldest_absent(state.queues, cache, group, PROBATION)
    if resident < 0:
        resident = oldest_absent(state.queues, cache, group, PROTECTED)
    if leaving < 0 or (resident >= 0 and state.uses[leaving] > state.uses[resident]):
        return resident
    return leaving


def on_evict(state, cache, group, key):
    put(state.queues, group, key, NOWHERE)


def on_insert(state, cache, group, key):
    queues = state.queues
    put(queues, group, key, WINDOW)
    while (
        queues.size[WINDOW] > state.most_window
        and queues.size[PROBATION] + queues.size[PROTECTED] < state.most_main
    ):
        put(queues, group, oldest(queues, group, WINDOW), PROBATION)
