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
    load_half_row,
    load_row,
    new_rows,
    replaced,
    store_row,
)

_CHUNK = 8  # slots: half a row
_LANES = 16
# A line of the table of groups, one cache line:
_FARTHEST, _IN_CHUNK = 0, 1  # its maximum, and the chunk that holds it
_SKIP = 2  # from a chunk to its maximum
_FIRST_ROW = 3  # of maxima of its chunks
_TOP, _END_TOP = 4, 5  # maxima of those rows, in whole rows; none where there is one row
_FREE_SLOT, _END_SLOT = 6, 7
_FIELDS = 8


@kernel_jit
def _replace(stack: Any, g: Any, value: Any) -> Any:
    """Write a next use in place of the group's farthest; returns its slot.

    No next use occurs twice in the stack, so the maximum itself says where it is.
    """
    groups, nexts, chunk_max, row_max, row_chunk = stack
    old = groups[g, _FARTHEST]
    chunk = groups[g, _IN_CHUNK]
    skip = groups[g, _SKIP]
    slot = chunk * np.uint64(_CHUNK)
    before = load_half_row(nexts, slot)
    after = replaced(before, old, value)
    store_row(nexts, slot, after)
    place = chunk + skip
    first = place & ~np.uint64(_LANES - 1)
    row = replaced(load_row(chunk_max, first), old, largest(after))
    store_row(chunk_max, first, row)
    best = largest(row)
    found = first + lane_with(row, best) - skip
    if groups[g, _END_TOP] > groups[g, _TOP]:
        top = groups[g, _TOP] + (first >> np.uint64(4)) - groups[g, _FIRST_ROW]
        row_chunk[top] = found
        first = top & ~np.uint64(_LANES - 1)
        store_row(row_max, first, replaced(load_row(row_max, first), old, best))
        best = np.uint64(0)
        for at in range(groups[g, _TOP], groups[g, _END_TOP], np.uint64(_LANES)):
            row = load_row(row_max, at)
            most = largest(row)
            if most > best:
                best = most
                found = np.uint64(row_chunk[at + lane_with(row, most)])
    groups[g, _FARTHEST] = best
    groups[g, _IN_CHUNK] = found
    return slot + lane_with(before, old)


@kernel_jit
def _put(stack: Any, g: Any, slot: Any, value: Any) -> None:
    """Write a next use that is not nearer than what the slot held."""
    groups, nexts, chunk_max, row_max, row_chunk = stack
    nexts[slot] = value
    chunk = slot >> np.uint64(3)
    place = chunk + groups[g, _SKIP]
    if value > chunk_max[place]:
        chunk_max[place] = value
        if groups[g, _END_TOP] > groups[g, _TOP]:
            top = groups[g, _TOP] + (place >> np.uint64(4)) - groups[g, _FIRST_ROW]
            if value > row_max[top]:
                row_max[top] = value
                row_chunk[top] = chunk
        if value > groups[g, _FARTHEST]:
            groups[g, _FARTHEST] = value
            groups[g, _IN_CHUNK] = chunk


@cached_jit(nogil=True, _nrt=False)
def _levels(
    first: int,
    until: int,
    set_layer: Any,
    offsets: Any,
    experts: Any,
    next_use: Any,
    cached: Any,
    index_in_group: Any,
    n_expert: int,
    every_pick: bool,
    stack: Any,
    owner: Any,
    group_of_chunk: Any,
    full: Any,
    slot_of: Any,
    levels: Any,
) -> None:
    """Write the level of each lookup of one pool in sets ``first`` up to ``until``.

    Args:
        set_layer, offsets, experts, next_use: as in kernel.py. cached: bool [sets], on the cached
            path. every_pick: each lookup is a set of its own.
        stack: (the table of groups: uint64 [groups, _FIELDS]; next uses: uint32 [slots], 0 where
            empty; maxima of chunks, maxima of their rows, and the chunks of these: uint32).
        owner: int32 [slots]. group_of_chunk: uint16 [chunks]. full: int64 [1], groups that are
            full: the first ones.
        slot_of: int32 [keys], -1 outside.
        levels: uint16 [lookups], written.
    """
    table = stack[0]
    groups = len(table)
    for s in range(first, until):
        layer = index_in_group[set_layer[s]]
        if layer < 0:
            continue
        base = np.uint32(layer * n_expert)
        begin = offsets[s]
        end = offsets[s + 1]
        for i in range(np.uint64(begin), np.uint64(end)):
            slot = slot_of[np.uint32(base + experts[i])]
            levels[i] = groups if slot < 0 else group_of_chunk[np.uint64(slot) >> np.uint64(3)]
        if not cached[s]:
            continue
        step = 1 if every_pick else end - begin
        for start in range(begin, end, step):
            for i in range(np.uint64(start), np.uint64(start + step)):
                key = np.uint32(base + experts[i])
                old = slot_of[key]
                home: Any = groups  # the group to fill up to
                if old >= 0:
                    home = np.int64(group_of_chunk[np.uint64(old) >> np.uint64(3)])
                if every_pick:
                    levels[i] = home  # an earlier pick of the row may have moved it
                if home == 0:
                    if every_pick:
                        _put(stack, np.uint64(0), np.uint64(old), np.uint64(next_use[i]))
                    continue
                moving: Any = np.int64(key)
                nearer = np.uint64(i)
                # alone in its set, it counts with its next use at once
                entering = np.uint64(next_use[i]) if every_pick else nearer
                until_group = np.uint64(min(home, full[0]))
                for g in range(until_group):
                    pushed = table[g, _FARTHEST]
                    if pushed > nearer:
                        slot = _replace(stack, g, entering)
                        nearer = entering = pushed
                        gone = owner[slot]
                        owner[slot] = moving
                        slot_of[np.uint64(moving)] = slot
                        moving = np.int64(gone)
                if full[0] < home:  # only keys that were outside come to a free place
                    filling = np.uint64(full[0])
                    slot = table[filling, _FREE_SLOT]
                    table[filling, _FREE_SLOT] += np.uint64(1)
                    full[0] += table[filling, _FREE_SLOT] == table[filling, _END_SLOT]
                    owner[slot] = moving
                    slot_of[np.uint64(moving)] = slot
                    _put(stack, filling, slot, entering)
                    moving = -1
                if moving >= 0:
                    slot_of[np.uint64(moving)] = old
                    if old >= 0:
                        owner[np.uint64(old)] = moving
                        _put(stack, np.uint64(home), np.uint64(old), entering)
            if every_pick:
                continue
            for i in range(np.uint64(start), np.uint64(start + step)):
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
        table[:, _FREE_SLOT] = (end_chunk - chunks) * _CHUNK
        table[:, _END_SLOT] = table[:, _FREE_SLOT] + room.astype(np.uint64)
        stack = (
            table,
            new_rows(np.uint32, end_chunk[-1] * _CHUNK),
            new_rows(np.uint32, end_row[-1] * _LANES),
            new_rows(np.uint32, end_top[-1] * _LANES),
            np.zeros(end_top[-1] * _LANES, np.uint32),
        )
        self._sets = (
            set_layer, offsets, experts, next_use, cached, index_in_group, n_expert, every_pick,
        )  # fmt: skip
        self._state = (
            stack,
            np.zeros(len(stack[1]), np.int32),
            np.repeat(np.arange(len(room)), chunks).astype(np.uint16),
            np.zeros(1, np.int64),
            np.full(keys, -1, np.int32),
        )
        self._levels = levels

    def run(self, first: int, until: int) -> None:
        """Go on with sets ``first`` up to ``until``."""
        _levels(first, until, *self._sets, *self._state, self._levels)
