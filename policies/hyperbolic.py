"""Hyperbolic caching: of some resident keys drawn at random, the one with the fewest uses per time
since its upload leaves.

Time counts lookups. Draws that name a present member are repeated; of equals the first drawn
leaves. Seeded by --seed.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.protocol import Param
from simlab.policy.sampling import Residents, draw_absent, enter, leave, new_residents

NAME = "hyperbolic"
VERSION = 1
SOURCE = "Blankstein, Sen & Freedman 2017, Hyperbolic caching (USENIX ATC)"
PARAMS = {"sample": Param(64, low=1, high=1e6, doc="keys drawn per eviction (whole number)")}


class State(NamedTuple):
    residents: Residents
    uses: npt.NDArray[np.int64]  # [keys], since the upload
    since: npt.NDArray[np.int64]  # [keys], time of the upload
    clock: npt.NDArray[np.int64]  # [1]
    sample: int


def init(geometry, slots, params):
    return State(
        residents=new_residents(geometry.keys, geometry.seed),
        uses=np.zeros(geometry.keys, np.int64),
        since=np.zeros(geometry.keys, np.int64),
        clock=np.zeros(1, np.int64),
        sample=int(params["sample"]),
    )


def on_set(state, cache, group, layer, experts):
    state.clock[0] += experts.shape[0]


def on_hit(state, cache, group, key):
    state.uses[key] += 1


def victim(state, cache, group, key):
    best = np.int64(-1)
    least = np.inf
    for _ in range(state.sample):
        drawn = draw_absent(state.residents, cache)
        # a set lies between the upload of an absent key and now: no division by zero
        rate = state.uses[drawn] / (state.clock[0] - state.since[drawn])
        if rate < least:
            least = rate
            best = np.int64(drawn)
    return best


def on_evict(state, cache, group, key):
    leave(state.residents, key)


def on_insert(state, cache, group, key):
    state.uses[key] = 1
    state.since[key] = state.clock[0]
    enter(state.residents, key)
