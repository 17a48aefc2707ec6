"""LRU under ``per-pick`` at every size in one pass: how many other keys were used since?

LRU is a stack algorithm there (Mattson 1970): an access hits in a pool of S slots if and only if
fewer than S distinct other keys were accessed since its key's last access. That distance is counted
on a timeline of one bit a position, set where a key was last accessed: the keys used since are the
bits set behind it. Two levels of running counts make the count O(1): ``counts`` of the bits up to
the end of a word, within its chunk of 16 or 32 words, and of those before a chunk. Clearing a bit
subtracts 1 from the counts behind it, one vector operation a level. Setting one costs nothing: a
word's bits are all set as it begins, for what lies ahead of an access is not counted. When the
timeline is full, its bits move to the front.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import cached_jit
from simlab.replay.lanes import (
    load_half_rows,
    load_row,
    new_rows,
    plus,
    plus_each,
    set_bits,
    store_row,
)

#: Words of 64 positions in a chunk: their counts are half a row, or in a large pool a whole one.
_HALF_ROW = 16
#: Chunks of a timeline. Word 0 stays empty, so that position 0 can stand for "never accessed".
_CHUNKS = 32
#: Keys that leave enough of the timeline to new accesses: more than a half, and a third.
FEW_KEYS, MOST_KEYS = 12_000, 40_000
# One array, since every pointer takes a register: ``counts`` of words, of chunks
# (``_CHUNK_COUNTS``), the rows that subtract 1 from lane 0, 1, 2, ... on (``_LESS``), and the
# position of each key's bit, 0 before its first access (``_KEYS``).
_LANES = np.uint64(_CHUNKS)
_CHUNK_COUNTS = np.uint64(_CHUNKS * 2 * _HALF_ROW)
_LESS = _CHUNK_COUNTS + _LANES
_LESS_BEHIND = _LESS + _LANES
_KEYS = _LESS + (_LANES + np.uint64(1)) * _LANES
_FULL = np.uint64(2**64 - 1)
#: Keys that are looked up before their accesses are counted, and of those the ones taken at once.
_AHEAD, _AT_ONCE = 1024, np.uint64(16)


@cached_jit(nogil=True, _nrt=False)
def _levels(
    first: int,
    until: int,
    set_layer: Any,
    offsets: Any,
    experts: Any,
    index_in_group: Any,
    n_expert: int,
    level_of: Any,
    cold: int,
    halves: Any,
    state: Any,
    counts: Any,
    words: Any,
    keys: Any,
    levels: Any,
) -> None:
    """Write the level of each access of one group in sets ``first`` up to ``until``.

    Args:
        set_layer, offsets, experts: access sets of EVERY_PICK order. index_in_group: as kernel.py.
        level_of: uint16 [keys], level by distance, or None where they are the same. cold: the level
            of first accesses.
        halves: as many as a chunk's row of counts has: a tuple, whose length is a type to numba.
        state: int64 [2], next position and keys met, kept between calls.
        counts: uint16 [_KEYS + keys], words: uint64, one of the timeline each; zero at the start
            but for what subtracts.
        keys: uint16 [_AHEAD + _AT_ONCE], scratch.
        levels: uint16 [lookups], written.
    """
    now = np.uint64(state[0])
    live = np.uint64(state[1])
    one = np.uint64(1)
    in_word = np.uint64(63)
    in_a_chunk = np.uint64(_HALF_ROW * len(halves))
    in_chunk = in_a_chunk - one
    s = np.uint64(first)
    i = np.uint64(offsets[s])
    # A row that every access changes stays in registers: through memory each would wait for the
    # one before it.
    chunks = load_row(counts, _CHUNK_COUNTS)
    while True:
        start, s, i, n = _look_up(
            s, np.uint64(until), i, set_layer, offsets, experts, index_in_group, n_expert, keys
        )
        if n == np.uint64(0):
            break
        j = np.uint64(0)
        while j < n:
            room = np.uint64(64) - (now & in_word)
            if room == np.uint64(64):
                now = _begin_word(now, counts, words, in_a_chunk)
                chunks = load_row(counts, _CHUNK_COUNTS)
            stop = min(n, j + room)
            ahead = now - j
            while j < stop:
                key = _KEYS + np.uint64(keys[j])
                at = np.uint64(counts[key])
                counts[key] = ahead + j
                if at == np.uint64(0):
                    levels[start + j] = cold
                    live += one
                    j += one
                    continue
                word = at >> np.uint64(6)
                chunk = word // in_a_chunk
                bits = words[word]
                words[word] = bits ^ (one << (at & in_word))
                rest = set_bits(bits >> (at & in_word))  # of its word, with its own
                up_to_word = np.uint64(counts[_CHUNK_COUNTS + chunk]) + np.uint64(counts[word])
                distance = live - up_to_word + rest - one
                levels[start + j] = distance if level_of is None else level_of[distance]
                first_word = word & ~in_chunk
                less = load_half_rows(counts, _LESS + (word & in_chunk) * _LANES, halves)
                row = plus(load_half_rows(counts, first_word, halves), less)
                store_row(counts, first_word, row)
                behind = first_word * (_LANES // in_a_chunk)  # a row of _LESS_BEHIND for each chunk
                chunks = plus(chunks, load_row(counts, _LESS_BEHIND + behind))
                store_row(counts, _CHUNK_COUNTS, chunks)
                j += one
            now = ahead + j
    state[0] = now
    state[1] = live


@cached_jit(_nrt=False)
def _look_up(
    s: Any,
    until: Any,
    i: Any,
    set_layer: Any,
    offsets: Any,
    experts: Any,
    index_in_group: Any,
    n_expert: int,
    keys: Any,
) -> Any:
    """The keys of the next accesses of the group, as far as they follow one another in the trace.

    Returns the index of the first, the set and index to go on with, and how many: 0 at the end.
    """
    n = np.uint64(0)
    start = i
    one = np.uint64(1)
    # from which on _AT_ONCE can no longer be read
    last = np.uint64(max(len(experts) + 1 - int(_AT_ONCE), 0))
    while s < until:
        layer = np.int64(index_in_group[np.uint64(set_layer[s])])
        end = np.uint64(offsets[s + one])
        if layer >= 0:
            base = np.uint64(layer * n_expert)
            while i < end:
                some = min(end - i, _AT_ONCE)
                if i < last:  # what is read behind `end` will be written over
                    store_row(keys, n, plus_each(load_half_rows(experts, i, (0,)), base))
                else:
                    for each in range(some):
                        keys[n + each] = base + experts[i + each]
                n += some
                i += some
                if n > np.uint64(_AHEAD):
                    return start, s, i, n
        elif n > np.uint64(0):
            break
        else:
            start = end
        i = end
        s += one
    return start, s, i, n


@cached_jit(_nrt=False)
def _begin_word(now: Any, counts: Any, words: Any, in_a_chunk: Any) -> Any:
    """Begin the word of position ``now``; returns ``now``, moved where the timeline was full."""
    if now >> np.uint64(6) == np.uint64(len(words)):
        now = np.uint64(_compact(counts, words, in_a_chunk))
    word = now >> np.uint64(6)
    before = np.uint64(counts[word - np.uint64(1)])
    if word % in_a_chunk == np.uint64(0):
        chunk = _CHUNK_COUNTS + word // in_a_chunk
        counts[chunk] = counts[chunk - np.uint64(1)] + before
        before = np.uint64(0)
    counts[word] = before + np.uint64(64)
    words[word] = _FULL
    return now


@cached_jit(_nrt=False)
def _compact(counts: Any, words: Any, in_a_chunk: Any) -> Any:
    """Move the set bits to the front, in their order; returns the position of the next word."""
    for w in range(np.uint64(1), np.uint64(len(words))):  # the position behind its last bit
        counts[w] += counts[_CHUNK_COUNTS + w // in_a_chunk] + np.uint64(64)
    for key in range(_KEYS, np.uint64(len(counts))):
        at = np.uint64(counts[key])
        word = at >> np.uint64(6)
        counts[key] = np.uint64(counts[word]) - set_bits(words[word] >> (at & np.uint64(63)))
    end: Any = np.int64(counts[len(words) - 1])
    total = 0
    inside: Any = 0
    for again in range(len(words)):
        if np.uint64(again) % in_a_chunk == np.uint64(0):
            total += inside
            inside = 0
            counts[_CHUNK_COUNTS + np.uint64(again) // in_a_chunk] = total
        bits: Any = min(max(end - 64 * again, 0), 64) if again > 0 else 0
        words[again] = _FULL if bits == 64 else (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
        inside += bits
        counts[again] = inside
    return (end + 63) // 64 * 64


class LruLevels:
    """One pool's pass over the access sets, in as many calls of ``run`` as wanted.

    Args:
        set_layer, offsets, experts: access sets of EVERY_PICK order. index_in_group: as kernel.py.
        keys: of the pool, at most MOST_KEYS.
        sizes: ascending slots; an access has level j if sizes[j] is the least that it hits in, and
            level len(sizes) if it misses in all.
        levels: uint16 [lookups], written for the accesses of the pool.
    """

    def __init__(
        self,
        set_layer: npt.NDArray[np.int16],
        offsets: npt.NDArray[np.int64],
        experts: npt.NDArray[np.uint16],
        index_in_group: npt.NDArray[np.int32],
        n_expert: int,
        keys: int,
        sizes: npt.NDArray[np.int64],
        levels: npt.NDArray[np.uint16],
    ) -> None:
        level_of = np.searchsorted(sizes, np.arange(keys), side="right").astype(np.uint16)
        same = np.array_equal(level_of, np.arange(keys))  # every size is asked for
        halves = (0,) if keys <= FEW_KEYS else (0, 0)
        self._arguments = (
            set_layer, offsets, np.ascontiguousarray(experts), index_in_group, n_expert,
            None if same else level_of, len(sizes), halves,
        )  # fmt: skip
        counts = new_rows(np.uint16, int(_KEYS) + keys)
        less = np.arange(_CHUNKS) >= np.arange(_CHUNKS + 1)[:, None]
        counts[int(_LESS) : int(_KEYS)] = -less.ravel().astype(np.int16)
        self._state = (
            np.array([64, 0], np.int64),
            counts,
            np.zeros(_CHUNKS * _HALF_ROW * len(halves), np.uint64),
            new_rows(np.uint16, _AHEAD + int(_AT_ONCE)),
        )
        self._levels = levels

    def run(self, first: int, until: int) -> None:
        """Go on with sets ``first`` up to ``until``."""
        _levels(first, until, *self._arguments, *self._state, self._levels)
