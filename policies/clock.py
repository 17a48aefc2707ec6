"""CLOCK: FIFO with a second chance. A hit sets the key's reference bit; the hand clears set bits
and takes the first key whose bit is clear.

The hand passes members of the present set and leaves their bits as they are.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.linked import Lists, after, move_back, new_lists, push_back, unlink

NAME = "clock"
VERSION = 1
SOURCE = "Corbató 1968, A paging experiment with the Multics system"


class State(NamedTuple):
    ring: Lists  # the hand stands before its first key
    used: npt.NDArray[np.bool_]  # [keys], reference bits


def init(geometry, slots, params):
    return State(ring=new_lists(geometry.keys, 1), used=np.zeros(geometry.keys, np.bool_))


def on_hit(state, cache, group, key):
    state.used[key] = True


def victim(state, cache, group, key):
    while True:
        hand = after(state.ring, group.keys)
        if cache.stamp[hand] != cache.now[0]:
            if not state.used[hand]:
                return hand
            state.used[hand] = False
        move_back(state.ring, group.keys, hand)


def on_evict(state, cache, group, key):
    unlink(state.ring, key)


def on_insert(state, cache, group, key):
    state.used[key] = False
    push_back(state.ring, group.keys, key)
