"""LRU under ``per-pick`` at every size in one pass: how many other keys were used since?

LRU is a stack algorithm there (Mattson 1970): an access hits in a pool of S slots if and only if
fewer than S distinct other keys were accessed since its key's last access. That distance is counted
on a timeline of one bit a position, set where a key was last accessed: the keys used since are the
bits set behind it. Two levels of running counts make the count O(1): ``counts`` of the bits up to
the end of a word, within its chunk of 32 words, and of those before a chunk. Clearing a bit
subtracts 1 from the counts behind it, one vector operation a level. Setting one costs nothing: a
word's bits are all set as it begins, for what lies ahead of an access is not counted. When the
timeline is full, its bits move to the front.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import cached_jit
from simlab.replay.lanes import load_row, new_rows, plus, set_bits, store_row

_LANES = 32
#: Positions of the timeline: 32 chunks of 32 words of 64 bits. Word 0 stays empty, so that position
#: 0 can stand for "never accessed".
_POSITIONS = _LANES * _LANES * 64
#: Keys that still leave a third of the timeline to new accesses.
MOST_KEYS = 40_000
# One array, since every pointer takes a register: ``counts`` of words, of chunks (``_CHUNKS``), the
# rows that subtract 1 from lane 0, 1, 2, ... on (``_LESS``), and the position of each key's bit, 0
# before its first access (``_KEYS``).
_CHUNKS = np.uint64(_LANES * _LANES)
_LESS = np.uint64(_LANES * _LANES + _LANES)
_LESS_BEHIND = _LESS + np.uint64(_LANES)
_KEYS = int(_LESS) + (_LANES + 1) * _LANES
_FULL = np.uint64(2**64 - 1)


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
    state: Any,
    counts: Any,
    words: Any,
    levels: Any,
) -> None:
    """Write the level of each access of one group in sets ``first`` up to ``until``.

    Args:
        set_layer, offsets, experts: access sets of EVERY_PICK order. index_in_group: as kernel.py.
        level_of: uint16 [keys], level by distance, or None where they are the same. cold: the level
            of first accesses.
        state: int64 [2], next position and keys met, kept between calls.
        counts: uint16 [_KEYS + keys], words: uint64 [_POSITIONS / 64]; zero at the start but for
            the rows that subtract.
        levels: uint16 [lookups], written.
    """
    now = np.uint64(state[0])
    live = np.uint64(state[1])
    one = np.uint64(1)
    in_word = np.uint64(63)
    in_row = np.uint64(_LANES - 1)
    # A row that every access changes stays in registers: through memory each would wait for the
    # one before it.
    chunks = load_row(counts, _CHUNKS)
    for s in range(np.uint64(first), np.uint64(until)):
        layer = np.int64(index_in_group[np.uint64(set_layer[s])])
        if layer < 0:
            continue
        base = np.uint32(_KEYS + layer * n_expert)
        i = np.uint64(offsets[s])
        end = np.uint64(offsets[s + one])
        while i < end:
            room = np.uint64(64) - (now & in_word)
            if room == np.uint64(64):
                now = _begin_word(now, counts, words)
                chunks = load_row(counts, _CHUNKS)
            stop = min(end, i + room)
            ahead = now - i
            while i < stop:
                key = np.uint32(base + experts[i])
                at = np.uint64(counts[key])
                counts[key] = i + ahead
                if at == np.uint64(0):
                    levels[i] = cold
                    live += one
                    i += one
                    continue
                word = at >> np.uint64(6)
                chunk = at >> np.uint64(11)
                bits = words[word]
                words[word] = bits ^ (one << (at & in_word))
                rest = set_bits(bits >> (at & in_word))  # of its word, with its own
                up_to_word = np.uint64(counts[_CHUNKS + chunk]) + np.uint64(counts[word])
                distance = live - up_to_word + rest - one
                levels[i] = distance if level_of is None else level_of[distance]
                first_word = word & ~in_row
                less = load_row(counts, _LESS + (word & in_row) * np.uint64(_LANES))
                store_row(counts, first_word, plus(load_row(counts, first_word), less))
                # a row of words and one that subtracts are as long
                chunks = plus(chunks, load_row(counts, _LESS_BEHIND + first_word))
                store_row(counts, _CHUNKS, chunks)
                i += one
            now = i + ahead
    state[0] = now
    state[1] = live


@cached_jit(_nrt=False)
def _begin_word(now: Any, counts: Any, words: Any) -> Any:
    """Begin the word of position ``now``; returns ``now``, moved where the timeline was full."""
    if now == np.uint64(_POSITIONS):
        now = np.uint64(_compact(counts, words))
    word = now >> np.uint64(6)
    before = np.uint64(counts[word - np.uint64(1)])
    if word & np.uint64(_LANES - 1) == np.uint64(0):
        chunk = _CHUNKS + (now >> np.uint64(11))
        counts[chunk] = counts[chunk - np.uint64(1)] + before
        before = np.uint64(0)
    counts[word] = before + np.uint64(64)
    words[word] = _FULL
    return now


@cached_jit(_nrt=False)
def _compact(counts: Any, words: Any) -> Any:
    """Move the set bits to the front, in their order; returns the position of the next word."""
    for w in range(np.uint64(1), np.uint64(len(words))):  # the position behind its last bit
        counts[w] += counts[_CHUNKS + (w >> np.uint64(5))] + np.uint64(64)
    for key in range(np.uint64(_KEYS), np.uint64(len(counts))):
        at = np.uint64(counts[key])
        word = at >> np.uint64(6)
        counts[key] = np.uint64(counts[word]) - set_bits(words[word] >> (at & np.uint64(63)))
    end: Any = np.int64(counts[len(words) - 1])
    total = 0
    inside: Any = 0
    for again in range(len(words)):
        if again % _LANES == 0:
            total += inside
            inside = 0
            counts[_CHUNKS + np.uint64(again // _LANES)] = total
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
        self._sets = (
            set_layer, offsets, experts, index_in_group, n_expert,
            None if same else level_of, len(sizes),
        )  # fmt: skip
        counts = new_rows(np.uint16, _KEYS + keys)
        less = np.arange(_LANES) >= np.arange(_LANES + 1)[:, None]
        counts[int(_LESS) : _KEYS] = -less.ravel().astype(np.int16)
        self._state = (np.array([64, 0], np.int64), counts, np.zeros(_POSITIONS // 64, np.uint64))
        self._levels = levels

    def run(self, first: int, until: int) -> None:
        """Go on with sets ``first`` up to ``until``."""
        _levels(first, until, *self._sets, *self._state, self._levels)
