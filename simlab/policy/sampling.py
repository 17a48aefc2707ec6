"""Drawing resident keys at random, reproducibly: splitmix64 (Steele, Lea & Flood 2014)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit


class Residents(NamedTuple):
    """``generator``: uint64 [1]; ``keys``: int32 [keys], the first n are the resident keys;
    ``place``: int32 [keys], index of a resident key in ``keys``; ``n``: int64 [1].
    """

    generator: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.int32]
    place: npt.NDArray[np.int32]
    n: npt.NDArray[np.int64]


def new_residents(n_keys: int, seed: int) -> Residents:
    """Nothing resident yet."""
    return Residents(
        generator=np.array([seed % 2**64], np.uint64),
        keys=np.zeros(n_keys, np.int32),
        place=np.zeros(n_keys, np.int32),
        n=np.zeros(1, np.int64),
    )


@kernel_jit
def draw(generator: Any) -> Any:
    """The next 64 random bits."""
    generator[0] += np.uint64(0x9E3779B97F4A7C15)
    z = generator[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel_jit
def uniform(generator: Any) -> float:
    """The next random number in [0, 1): 53 bits."""
    return np.float64(draw(generator) >> np.uint64(11)) / 9007199254740992.0


@kernel_jit
def draw_absent(residents: Residents, cache: Any) -> Any:
    """A resident key outside the present set, each with the same chance; there must be one."""
    while True:
        n = np.uint64(residents.n[0])
        chosen = residents.keys[np.int64(draw(residents.generator) % n)]
        if cache.stamp[chosen] != cache.now[0]:
            return chosen


@kernel_jit
def leave(residents: Residents, key: int) -> None:
    """A key was evicted: the last one takes its place."""
    residents.n[0] -= 1
    last = residents.keys[residents.n[0]]
    hole = residents.place[key]
    residents.keys[hole] = last
    residents.place[last] = hole


@kernel_jit
def enter(residents: Residents, key: int) -> None:
    """A key was given a slot."""
    residents.keys[residents.n[0]] = key
    residents.place[key] = residents.n[0]
    residents.n[0] += 1
