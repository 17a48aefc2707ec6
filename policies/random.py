"""Random replacement: any resident key outside the present set, each with the same chance.

Not a joke baseline: below one cycle T it beats LRU, whose order inside the layer cycle is exactly
wrong. The generator is splitmix64 (Steele, Lea & Flood 2014), seeded by --seed.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NAME = "random"
VERSION = 1
SOURCE = "Belady 1966, A study of replacement algorithms for a virtual-storage computer"


class State(NamedTuple):
    generator: npt.NDArray[np.uint64]  # [1]
    resident: npt.NDArray[np.int32]  # [keys], the first n are the resident keys
    place: npt.NDArray[np.int32]  # [keys], index of a resident key in `resident`
    n: npt.NDArray[np.int64]  # [1]


def init(geometry, slots, params):
    return State(
        generator=np.array([geometry.seed % 2**64], np.uint64),
        resident=np.zeros(geometry.keys, np.int32),
        place=np.zeros(geometry.keys, np.int32),
        n=np.zeros(1, np.int64),
    )


def draw(state):
    state.generator[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state.generator[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def victim(state, cache, group, key):
    while True:
        chosen = state.resident[np.int64(draw(state) % np.uint64(state.n[0]))]
        if cache.stamp[chosen] != cache.now[0]:
            return chosen


def on_evict(state, cache, group, key):
    state.n[0] -= 1
    last = state.resident[state.n[0]]
    hole = state.place[key]
    state.resident[hole] = last
    state.place[last] = hole


def on_insert(state, cache, group, key):
    state.resident[state.n[0]] = key
    state.place[key] = state.n[0]
    state.n[0] += 1
