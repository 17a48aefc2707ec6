"""``opt`` at many sizes in one pass, under ``per-pick`` and ``llama.cpp``.

Belady's rule names one order for all sizes, by next use, so what a pool of S slots holds is part of
what any larger one holds (Mattson 1970). One stack, cut into groups at the asked sizes, stands for
all pools: pool j holds groups 0..j. A member x of an access set that lies in group h moves to group
0 and pushes out that group's farthest next use; in each group up to h it changes places with the
farthest there if that is farther still, and takes the place that x left. So of a group only its
maximum matters: next uses lie in chunks of 8 with a maximum each, those in rows of 16, and so do
the maxima of these rows: one vector operation a level.

The present set is safe without a mark: until the whole set is in group 0 its members count with
their positions in it, which are nearer than any other next use. This asks that a set fits the
smallest size, which is what llama.cpp's gate asks too. Steps that fail the gate at every size
(more tokens than the cached path takes) only look where their keys lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import cached_jit, kernel_jit
from simlab.replay.lanes import (
    lane_with,
    largest,
    load_half_rows,
    load_row,
    new_rows,
    replaced,
    store_row,
)

# A chunk is one cache line: 8 next uses and the 8 keys that they belong to. A slot is the place of
# its next use in these lines.
_CHUNK = 8
_CHUNK_LINE = 16
_KEY = np.uint64(8)  # from a next use to its key
_LANES = 16
# A line of the table of groups, one cache line:
_IN_CHUNK = np.uint64(0)  # the chunk that holds its maximum
_SKIP = np.uint64(1)  # from a chunk to its maximum
_FIRST_ROW = np.uint64(2)  # of maxima of its chunks
_TOP = np.uint64(3)  # maxima of those rows, in whole rows; none where there is one row
_END_TOP = np.uint64(4)
_FREE_SLOT = np.uint64(5)
_END_SLOT = np.uint64(6)
_FIELDS = 8


@kernel_jit
def _line(g: Any) -> Any:
    """Where the line of a group begins in the table."""
    return np.uint64(g) * np.uint64(_FIELDS)


@kernel_jit
def _replace(stack: Any, g: Any, value: Any) -> Any:
    """Write a next use in place of the group's farthest; returns its slot.

    No next use occurs twice in the stack, so the maximum itself says where it is.
    """
    farthest, table, lines, chunk_max, row_max, row_chunk = stack
    line = _line(g)
    old = farthest[g]
    chunk = table[line + _IN_CHUNK]
    skip = table[line + _SKIP]
    slot = chunk * np.uint64(_CHUNK_LINE)
    before = load_half_rows(lines, slot, (0,))
    after = replaced(before, old, value)
    store_row(lines, slot, after)
    place = chunk + skip
    first = place & ~np.uint64(_LANES - 1)
    row = replaced(load_row(chunk_max, first), old, largest(after))
    store_row(chunk_max, first, row)
    best = largest(row)
    found = first + lane_with(row, best) - skip
    if table[line + _END_TOP] > table[line + _TOP]:
        top = table[line + _TOP] + (first >> np.uint64(4)) - table[line + _FIRST_ROW]
        row_chunk[top] = found
        first = top & ~np.uint64(_LANES - 1)
        store_row(row_max, first, replaced(load_row(row_max, first), old, best))
        best = np.uint64(0)
        for at in range(table[line + _TOP], table[line + _END_TOP], np.uint64(_LANES)):
            row = load_row(row_max, at)
            most = largest(row)
            if most > best:
                best = most
                found = np.uint64(row_chunk[at + lane_with(row, most)])
    farthest[g] = best
    table[line + _IN_CHUNK] = found
    return slot + lane_with(before, old)


@kernel_jit
def _put(stack: Any, g: Any, slot: Any, value: Any) -> None:
    """Write a next use that is not nearer than what the slot held."""
    farthest, table, lines, chunk_max, row_max, row_chunk = stack
    line = _line(g)
    lines[slot] = value
    chunk = slot >> np.uint64(4)
    place = chunk + table[line + _SKIP]
    if value > chunk_max[place]:
        chunk_max[place] = value
        if table[line + _END_TOP] > table[line + _TOP]:
            top = table[line + _TOP] + (place >> np.uint64(4)) - table[line + _FIRST_ROW]
            if value > row_max[top]:
                row_max[top] = value
                row_chunk[top] = chunk
        if value > farthest[g]:
            farthest[g] = value
            table[line + _IN_CHUNK] = chunk


@kernel_jit
def _enter(
    stack: Any, places: Any, key: Any, old: Any, home: Any, nearer: Any, entering: Any
) -> None:
    """Move a key into group 0, and into each group up to its old one what the group before lost.

    Args:
        places: group_of_chunk, full and slot_of, as in _of_sets.
        old: the key's slot or -1. home: the group of that slot; the number of groups if there is
            none.
        nearer: what the key counts with, of all next uses the nearest. entering: what is written
            for it.
    """
    farthest, table, lines = stack[:3]
    _, full, slot_of = places
    moving: Any = np.int64(key)
    for g in range(np.uint64(min(home, full[0]))):
        pushed = farthest[g]
        if pushed > nearer:
            slot = _replace(stack, g, entering)
            nearer = entering = pushed
            gone = lines[slot + _KEY]
            lines[slot + _KEY] = moving
            slot_of[np.uint64(moving)] = slot
            moving = np.int64(gone)
    if full[0] < home:  # only keys that were outside come to a free place
        filling = np.uint64(full[0])
        line = _line(filling)
        slot = table[line + _FREE_SLOT]
        after = slot + np.uint64(1)
        after += after & np.uint64(_CHUNK)  # over the keys to the next chunk
        table[line + _FREE_SLOT] = after
        full[0] += after == table[line + _END_SLOT]
        lines[slot + _KEY] = moving
        slot_of[np.uint64(moving)] = slot
        _put(stack, filling, slot, entering)
        return
    slot_of[np.uint64(moving)] = old
    if old >= 0:
        lines[np.uint64(old) + _KEY] = moving
        _put(stack, np.uint64(home), np.uint64(old), entering)


@kernel_jit
def _group_of(places: Any, slot: Any, groups: Any) -> Any:
    """The group of a slot; the number of groups for -1."""
    if slot < 0:
        return np.int64(groups)
    return np.int64(places[0][np.uint64(slot) >> np.uint64(4)])


@cached_jit(nogil=True, _nrt=False)
def _of_picks(first: int, until: int, sets: Any, stack: Any, places: Any, levels: Any) -> None:
    """As _of_sets, where each lookup is a set of its own."""
    set_layer, offsets, experts, next_use, cached, index_in_group, n_expert = sets
    groups = len(stack[0])
    slot_of = places[2]
    for s in range(np.uint64(first), np.uint64(until)):
        layer = index_in_group[np.uint64(set_layer[s])]
        if layer < 0:
            continue
        base = np.uint32(layer * n_expert)
        for i in range(np.uint64(offsets[s]), np.uint64(offsets[s + np.uint64(1)])):
            key = np.uint32(base + experts[i])
            old = slot_of[key]
            home = _group_of(places, old, groups)
            levels[i] = home
            if not cached[s]:
                continue
            # alone in its set, it counts with its next use at once
            entering = np.uint64(next_use[i])
            if home > 0:
                _enter(stack, places, key, old, home, i, entering)
            else:
                _put(stack, np.uint64(0), np.uint64(old), entering)


@cached_jit(nogil=True, _nrt=False)
def _of_sets(first: int, until: int, sets: Any, stack: Any, places: Any, levels: Any) -> None:
    """Write the level of each lookup of one pool in sets ``first`` up to ``until``.

    Args:
        sets: (set_layer, offsets, experts, next_use: as in kernel.py; cached: bool [sets], on the
            cached path; index_in_group, n_expert).
        stack: (maxima of groups: uint64 [groups]; their table: uint64 [groups x _FIELDS]; lines of
            chunks: uint32 [chunks x _CHUNK_LINE], next use 0 where empty; maxima of chunks, maxima
            of their rows, and the chunks of these: uint32).
        places: (group_of_chunk: uint16 [chunks]; full: int64 [1], groups that are full: the first
            ones; slot_of: int32 [keys], -1 outside).
        levels: uint16 [lookups], written.
    """
    set_layer, offsets, experts, next_use, cached, index_in_group, n_expert = sets
    groups = len(stack[0])
    slot_of = places[2]
    for s in range(np.uint64(first), np.uint64(until)):
        layer = index_in_group[np.uint64(set_layer[s])]
        if layer < 0:
            continue
        base = np.uint32(layer * n_expert)
        begin = np.uint64(offsets[s])
        end = np.uint64(offsets[s + np.uint64(1)])
        for i in range(begin, end):
            levels[i] = _group_of(places, slot_of[np.uint32(base + experts[i])], groups)
        if not cached[s]:
            continue
        for i in range(begin, end):
            key = np.uint32(base + experts[i])
            old = slot_of[key]
            home = _group_of(places, old, groups)  # an earlier member may have moved it
            if home > 0:
                _enter(stack, places, key, old, home, i, i)
        for i in range(begin, end):
            slot = np.uint64(slot_of[np.uint32(base + experts[i])])
            _put(stack, np.uint64(0), slot, np.uint64(next_use[i]))


class OptLevels:
    """One pool's pass over the access sets, in as many calls of ``run`` as wanted.

    Args:
        set_layer, offsets, experts: access sets. next_use: int32 [lookups], over the cached sets.
        cached: bool [sets], on the cached path; those sets fit sizes[0]. index_in_group: as
            kernel.py. keys: of the pool.
        every_pick: each lookup is a set of its own.
        sizes: ascending slots, none twice; a lookup has level j if sizes[j] is the least that holds
            its key as its set begins, and level len(sizes) if none does.
        levels: uint16 [lookups], written for the lookups of the pool.
    """

    def __init__(
        self,
        set_layer: npt.NDArray[np.int16],
        offsets: npt.NDArray[np.int64],
        experts: npt.NDArray[np.uint16],
        next_use: npt.NDArray[np.int32],
        cached: npt.NDArray[np.bool_],
        index_in_group: npt.NDArray[np.int32],
        n_expert: int,
        keys: int,
        every_pick: bool,
        sizes: npt.NDArray[np.int64],
        levels: npt.NDArray[np.uint16],
    ) -> None:
        room = np.diff(sizes, prepend=0)
        chunks = -(-room // _CHUNK)
        rows = -(-chunks // _LANES)
        tops = np.where(rows > 1, -(-rows // _LANES), 0)
        end_chunk, end_row, end_top = np.cumsum(chunks), np.cumsum(rows), np.cumsum(tops)
        table = new_rows(np.uint64, len(room) * _FIELDS).reshape(-1, _FIELDS)
        table[:, _FIRST_ROW] = end_row - rows
        table[:, _TOP], table[:, _END_TOP] = (end_top - tops) * _LANES, end_top * _LANES
        table[:, _SKIP] = (end_row - rows) * _LANES - (end_chunk - chunks)
        table[:, _FREE_SLOT] = (end_chunk - chunks) * _CHUNK_LINE
        full = room // _CHUNK
        table[:, _END_SLOT] = (end_chunk - chunks + full) * _CHUNK_LINE + room % _CHUNK
        stack = (
            np.zeros(len(room), np.uint64),
            table.reshape(-1),
            new_rows(np.uint32, end_chunk[-1] * _CHUNK_LINE),
            new_rows(np.uint32, end_row[-1] * _LANES),
            new_rows(np.uint32, end_top[-1] * _LANES),
            np.zeros(end_top[-1] * _LANES, np.uint32),
        )
        self._sets = (
            set_layer, offsets, experts, next_use, cached, index_in_group, n_expert,
        )  # fmt: skip
        places = (
            np.repeat(np.arange(len(room)), chunks).astype(np.uint16),
            np.zeros(1, np.int64),
            np.full(keys, -1, np.int32),
        )
        self._state = (stack, places)
        self._levels = levels
        self._pass = _of_picks if every_pick else _of_sets

    def run(self, first: int, until: int) -> None:
        """Go on with sets ``first`` up to ``until``."""
        self._pass(first, until, self._sets, *self._state, self._levels)
