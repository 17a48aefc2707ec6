"""SIEVE: FIFO order, a mark set by hits, and a hand that moves from old to new, clearing marks, and
takes the first unmarked key; keys that survive stay where they are.

The hand passes members of the present set and leaves their marks. With a shared pool it locks up:
once the hand is among the newcomers they leave before their layer returns.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.linked import Lists, after, new_lists, push_back, unlink

NAME = "sieve"
VERSION = 1
SOURCE = "Zhang et al. 2024, SIEVE is simpler than LRU (NSDI)"


class State(NamedTuple):
    arrival: Lists
    marked: npt.NDArray[np.bool_]  # [keys]
    hand: npt.NDArray[np.int64]  # [1], next key to look at; `keys` stands for the oldest


def init(geometry, slots, params):
    return State(
        arrival=new_lists(geometry.keys, 1),
        marked=np.zeros(geometry.keys, np.bool_),
        hand=np.array([geometry.keys], np.int64),
    )


def on_hit(state, cache, group, key):
    state.marked[key] = True


def victim(state, cache, group, key):
    hand = state.hand[0]
    while True:
        if hand == group.keys:  # past the newest: start again at the oldest
            hand = np.int64(after(state.arrival, group.keys))
        if cache.stamp[hand] != cache.now[0]:
            if not state.marked[hand]:
                state.hand[0] = hand
                return hand
            state.marked[hand] = False
        hand = np.int64(after(state.arrival, hand))


def on_evict(state, cache, group, key):
    if state.hand[0] == key:
        state.hand[0] = after(state.arrival, key)
    unlink(state.arrival, key)


def on_insert(state, cache, group, key):
    state.marked[key] = False
    push_back(state.arrival, group.keys, key)
