"""LRU under ``per-pick`` at every size in one pass: how many other keys were used since?

LRU is a stack algorithm there (Mattson 1970): an access hits in a pool of S slots if and only if
fewer than S distinct other keys were accessed since its key's last access. That distance is counted
on a timeline of one bit a position, set where a key was last accessed: the keys used since are the
bits set behind it. Two levels of running counts make the count O(1): ``mid`` counts the bits before
a word within its chunk of 32 words, ``top`` those before a chunk. Clearing a bit subtracts 1 from
the counts behind it, one vector operation a level; setting one at the end changes no count. When
the timeline is full, its bits move to the front.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from simlab.policy.jit import cached_jit

_LANES = 32
#: Positions of the timeline: 32 chunks of 32 words of 64 bits. Position 0 stays empty, so that 0
#: can stand for "never accessed".
_POSITIONS = _LANES * _LANES * 64
#: Keys that still leave a third of the timeline to new accesses.
MOST_KEYS = 40_000


@intrinsic
def _popcount(typingctx: Any, word: Any) -> Any:
    """Number of set bits of a uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def _lowest_bit(typingctx: Any, word: Any) -> Any:
    """Index of the lowest set bit of a uint64 that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen


@intrinsic
def _subtract_behind(typingctx: Any, counts: Any, row: Any, lane: Any) -> Any:
    """counts[32 * row + i] -= 1 for lane < i < 32, as one vector operation; counts: uint16."""
    vector = ir.VectorType(ir.IntType(16), _LANES)
    iota = ir.Constant(vector, list(range(_LANES)))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        first = builder.mul(args[1], ir.Constant(args[1].type, _LANES))
        pointer = builder.gep(array.data, [first])
        pointer = builder.bitcast(pointer, vector.as_pointer())
        here = builder.trunc(args[2], ir.IntType(16))
        splat = ir.Constant(vector, ir.Undefined)
        splat = builder.insert_element(splat, here, ir.Constant(ir.IntType(32), 0))
        order = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        splat = builder.shuffle_vector(splat, ir.Constant(vector, ir.Undefined), order)
        less = builder.sext(builder.icmp_signed(">", iota, splat), vector)  # -1 where behind
        old = builder.load(pointer)
        old.align = 2
        builder.store(builder.add(old, less), pointer, align=2)
        return context.get_dummy_value()

    return types.void(counts, types.uint64, types.uint64), codegen


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
    state: Any,
    last: Any,
    owner: Any,
    words: Any,
    mid: Any,
    top: Any,
    levels: Any,
) -> None:
    """Write the level of each access of one group in sets ``first`` up to ``until``.

    Args:
        set_layer, offsets, experts: access sets of EVERY_PICK order. index_in_group: as kernel.py.
        level_of: uint16 [keys + 1], level by distance; the last entry is that of first accesses.
        state: int64 [2], next position (from 1) and keys met, kept between calls.
        last: uint16 [keys], position of a key's bit, 0 before its first access. owner: uint16
            [positions], whose bit it was. words: uint64, mid, top: uint16; zero at the start.
        levels: uint16 [lookups], written.
    """
    cold = level_of[len(level_of) - 1]
    now = np.uint64(state[0])
    live = np.uint64(state[1])
    one = np.uint64(1)
    for s in range(first, until):
        layer = index_in_group[set_layer[s]]
        if layer < 0:
            continue
        base = np.uint32(layer * n_expert)
        for i in range(np.uint64(offsets[s]), np.uint64(offsets[s + 1])):
            key = np.uint32(base + experts[i])
            at = np.uint64(last[key])
            if at != np.uint64(0):
                word = at >> np.uint64(6)
                chunk = at >> np.uint64(11)
                bit = one << (at & np.uint64(63))
                below = _popcount(words[word] & (bit - one))
                distance = live - one - (np.uint64(top[chunk]) + np.uint64(mid[word]) + below)
                levels[i] = level_of[distance]
                words[word] ^= bit
                _subtract_behind(mid, chunk, word & np.uint64(31))
                _subtract_behind(top, np.uint64(0), chunk)
            else:
                levels[i] = cold
                live += one
            if now == np.uint64(_POSITIONS):
                now = _compact(last, owner, words, mid, top)
            word = now >> np.uint64(6)
            if now & np.uint64(63) == np.uint64(0):  # a new word: what is before it is known now
                chunk = now >> np.uint64(11)
                if now & np.uint64(2047) == np.uint64(0):
                    before = chunk - one  # chunk 0 began with position 0
                    previous = word - one
                    top[chunk] = top[before] + mid[previous] + _popcount(words[previous])
                    mid[word] = 0
                else:
                    previous = word - one
                    mid[word] = mid[previous] + _popcount(words[previous])
            words[word] |= one << (now & np.uint64(63))
            last[key] = now
            owner[now] = key
            now += one
    state[0] = now
    state[1] = live


@cached_jit(_nrt=False)
def _compact(last: Any, owner: Any, words: Any, mid: Any, top: Any) -> Any:
    """Move the set bits to the front, in their order; returns the next free position."""
    to = np.uint64(1)
    for w in range(len(words)):
        word = words[w]
        while word != np.uint64(0):
            key = owner[np.uint64(w * 64) + _lowest_bit(word)]
            word &= word - np.uint64(1)
            owner[to] = key
            last[key] = to
            to += np.uint64(1)
    end: Any = np.int64(to)
    for w in range(len(words)):
        first = w << 6
        if first + 64 <= end:
            words[w] = np.uint64(0xFFFFFFFFFFFFFFFF)
        elif first < end:
            words[w] = (np.uint64(1) << np.uint64(end - first)) - np.uint64(1)
        else:
            words[w] = np.uint64(0)
    words[0] ^= np.uint64(1)
    for w in range(len(words)):
        first = w << 6
        chunk = first & ~2047
        mid[w] = max(min(end, first), 1) - max(min(end, chunk), 1)
    for chunk in range(len(top)):
        top[chunk] = max(min(end, chunk << 11), 1) - 1
    return to


def _aligned(size: int) -> npt.NDArray[np.uint16]:
    """Zeros that begin a cache line: vectors across two lines cost twice."""
    room = np.zeros(size + 31, np.uint16)
    start = -(room.ctypes.data // 2) % 32
    return room[start : start + size]


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
        level_of = np.full(keys + 1, len(sizes), np.uint16)
        level_of[:keys] = np.searchsorted(sizes, np.arange(keys), side="right")
        self._sets = (set_layer, offsets, experts, index_in_group, n_expert, level_of)
        self._state = (
            np.array([1, 0], np.int64),
            np.zeros(keys, np.uint16),
            np.zeros(_POSITIONS, np.uint16),
            np.zeros(_POSITIONS // 64, np.uint64),
            _aligned(_POSITIONS // 64),
            _aligned(_LANES),
        )
        self._levels = levels

    def run(self, first: int, until: int) -> None:
        """Go on with sets ``first`` up to ``until``."""
        _levels(first, until, *self._sets, *self._state, self._levels)
