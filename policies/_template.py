"""NAME: first sentence, what leaves when a slot is needed.

Then how, in a few sentences: what is remembered, how ties are broken, how the present set is kept.
This one evicts the least recently used key that was used at most `spare` times since its upload,
and if there is none the least recently used key.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Building blocks: linked (lists), queues (several lists), lowest (lowest score of each layer),
# sampling (random draws), counts (keys by use count), decayed, mixture, quota, pins.
from simlab.policy.linked import Lists, first_absent, move_back, new_lists, push_back, unlink
from simlab.policy.protocol import Param

NAME = "template"  # as typed after --policy
VERSION = 1  # raise it when results change; results are labelled template@1
SOURCE = "simlab's template"  # where the idea was published
PARAMS = {"spare": Param(1, low=0, high=1e6, doc="uses that do not protect yet")}  # --param spare=3
NEEDS = ()  # "weights": router weights; "bytes": expert sizes; "next_use", "uses": bounds only
BOUND = False  # True: a bound, which reads the future
DECLINES = False  # True: it has admit() and may leave a miss without a slot


class State(NamedTuple):
    """All that the policy remembers: arrays, and numbers that never change."""

    cool: Lists  # used at most `spare` times, least recent first
    warm: Lists  # used more often
    uses: npt.NDArray[np.int64]  # [keys], since the upload
    spare: int


def init(geometry, slots, params):
    """Ordinary Python, once per pool; the only place that may allocate."""
    return State(
        cool=new_lists(geometry.keys, 1),
        warm=new_lists(geometry.keys, 1),
        uses=np.zeros(geometry.keys, np.int64),
        spare=int(params["spare"]),
    )


# All functions below are compiled: arrays, numbers, loops and ifs, nothing else. A key is
# layer * group.experts + expert; the sentinel of a list over keys is group.keys.


def on_hit(state, cache, group, key):
    """A member of the access set is resident."""
    state.uses[key] += 1
    if state.uses[key] > state.spare:
        unlink(state.cool, key)
        unlink(state.warm, key)
        push_back(state.warm, group.keys, key)
    else:
        move_back(state.cool, group.keys, key)


def victim(state, cache, group, key):
    """Who leaves for `key`? A resident key whose cache.stamp is not cache.now: never one of the
    present access set. Here first_absent sees to that.
    """
    chosen = first_absent(state.cool, cache, group.keys, group.keys)
    if chosen < 0:
        chosen = first_absent(state.warm, cache, group.keys, group.keys)
    return chosen


def on_evict(state, cache, group, key):
    """That key has left."""
    unlink(state.cool, key)
    unlink(state.warm, key)


def on_insert(state, cache, group, key):
    """That key has been given a slot."""
    state.uses[key] = 0
    push_back(state.cool, group.keys, key)


# Others, each optional: on_step(state, cache, group, tokens), on_set(state, cache, group, layer,
# experts), on_miss(state, cache, group, key), admit(state, cache, group, key, victim).
