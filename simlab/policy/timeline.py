"""The next uses of the resident keys as a bitset over future time: who is needed last?

Next uses are unique (a key never used again counts as horizon + key), so one bit a position says it
all. Four levels of 32-bit words, each bit of a level standing for a word of the level below, make
"the highest set bit below a position" a handful of word operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit


class Timeline(NamedTuple):
    """``words0..3``: uint32, the levels; ``owner``: int32 [horizon + keys], key whose next use is
    at that position; ``at``: int64 [keys], position of a resident key; ``end``: the number of
    positions.
    """

    words0: npt.NDArray[np.uint32]
    words1: npt.NDArray[np.uint32]
    words2: npt.NDArray[np.uint32]
    words3: npt.NDArray[np.uint32]
    owner: npt.NDArray[np.int32]
    at: npt.NDArray[np.int64]
    end: int


def new_timeline(n_keys: int, horizon: int) -> Timeline:
    """Nothing resident; positions 0 .. horizon + n_keys - 1."""
    end = horizon + n_keys
    size = [end]
    for _ in range(4):
        size.append(size[-1] // 32 + 1)
    return Timeline(
        words0=np.zeros(size[1], np.uint32),
        words1=np.zeros(size[2], np.uint32),
        words2=np.zeros(size[3], np.uint32),
        words3=np.zeros(size[4], np.uint32),
        owner=np.zeros(end, np.int32),
        at=np.full(n_keys, -1, np.int64),
        end=end,
    )


@kernel_jit
def insert(timeline: Any, key: int, position: int) -> None:
    """A key's next use is at ``position``."""
    timeline.at[key] = position
    timeline.owner[position] = key
    i = position
    timeline.words0[i >> 5] |= np.uint32(1 << (i & 31))
    i >>= 5
    timeline.words1[i >> 5] |= np.uint32(1 << (i & 31))
    i >>= 5
    timeline.words2[i >> 5] |= np.uint32(1 << (i & 31))
    i >>= 5
    timeline.words3[i >> 5] |= np.uint32(1 << (i & 31))


@kernel_jit
def remove(timeline: Any, key: int) -> None:
    """The key's next use is no longer of interest."""
    i = timeline.at[key]
    timeline.words0[i >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (i & 31)))
    i >>= 5
    if timeline.words0[i] == 0:
        timeline.words1[i >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (i & 31)))
        i >>= 5
        if timeline.words1[i] == 0:
            timeline.words2[i >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (i & 31)))
            i >>= 5
            if timeline.words2[i] == 0:
                timeline.words3[i >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (i & 31)))


@kernel_jit
def _top_bit(word: int) -> int:
    """Index of the highest set bit of a non-zero 32-bit word."""
    top = 0
    if word >> 16:
        word >>= 16
        top += 16
    if word >> 8:
        word >>= 8
        top += 8
    if word >> 4:
        word >>= 4
        top += 4
    if word >> 2:
        word >>= 2
        top += 2
    if word >> 1:
        top += 1
    return top


@kernel_jit
def _below(words: Any, i: int) -> Any:
    """The word at bit i's place, with only the bits below i."""
    return np.int64(words[i >> 5]) & ((1 << (i & 31)) - 1)


@kernel_jit
def latest_below(timeline: Any, position: int) -> Any:
    """The highest occupied position below ``position``, or -1."""
    i = position
    word = _below(timeline.words0, i)
    if word == 0:
        i >>= 5
        word = _below(timeline.words1, i)
        if word == 0:
            i >>= 5
            word = _below(timeline.words2, i)
            if word == 0:
                i >>= 5
                word = _below(timeline.words3, i)
                i >>= 5
                while word == 0:
                    i -= 1
                    if i < 0:
                        return -1
                    word = np.int64(timeline.words3[i])
                i = (i << 5) + _top_bit(word)
                word = np.int64(timeline.words2[i])
            else:
                i >>= 5
            i = (i << 5) + _top_bit(word)
            word = np.int64(timeline.words1[i])
        else:
            i >>= 5
        i = (i << 5) + _top_bit(word)
        word = np.int64(timeline.words0[i])
    else:
        i >>= 5
    return (i << 5) + _top_bit(word)
