"""``opt`` at many sizes in one pass, under ``per-pick`` and ``llama.cpp``.

Belady's rule names one order for all sizes, by next use, so what a pool of S slots holds is part of
what any larger one holds (Mattson 1970). One stack, cut into groups at the asked sizes, stands for
all pools: pool j holds groups 0..j. A member x of an access set that lies in group h moves to group
0 and pushes out that group's farthest next use; in each group up to h it changes places with the
farthest there if that is farther still, and takes the place that x left. So of a group only its
maximum matters: next uses lie in chunks of 16 with a maximum each, and those again in rows of 16,
one vector operation a level.

The present set is safe without a mark: until the whole set is in group 0 its members count with
their positions in it, which are nearer than any other next use. This asks that a set fits the
smallest size, which is what llama.cpp's gate asks too. Steps that fail the gate at every size
(more tokens than the cached path takes) only look where their keys lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from simlab.policy.jit import cached_jit, kernel_jit

_LANES = 16
#: All bits but those of the middle: KEEP[16 - lane:][:16] leaves all of a row but one lane.
KEEP = np.array([2**32 - 1] * _LANES + [0] + [2**32 - 1] * (_LANES - 1), np.uint32)


@intrinsic
def _lower(typingctx: Any, values: Any, row: Any, lane: Any, value: Any, keep: Any) -> Any:
    """Lower values[16 * row + lane] to value; returns the row's maximum and the lane where it is.

    values: uint32; keep: KEEP. The row is loaded, changed and stored as one vector: a load of 16
    numbers right behind a store of one would have to wait for it. What changes is read from memory,
    since LLVM makes a masked store of a choice by lane, many times slower on some processors.
    """
    result = types.UniTuple(types.uint64, 2)
    vector = ir.VectorType(ir.IntType(32), _LANES)
    undefined = ir.Constant(vector, ir.Undefined)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def row_at(kind: Any, array: Any, first: Any) -> Any:
            data = context.make_array(kind)(context, builder, array).data
            return builder.bitcast(builder.gep(data, [first]), vector.as_pointer())

        lanes = ir.Constant(args[1].type, _LANES)
        pointer = row_at(signature.args[0], args[0], builder.mul(args[1], lanes))
        old = builder.load(pointer, align=4)
        kept = row_at(signature.args[4], args[4], builder.sub(lanes, args[2]))
        one = builder.insert_element(undefined, args[3], ir.Constant(ir.IntType(32), 0))
        limit = builder.shuffle_vector(one, undefined, ir.Constant(vector, [0] * _LANES))
        limit = builder.or_(limit, builder.load(kept, align=4))
        new = builder.select(builder.icmp_unsigned("<", limit, old), limit, old)
        builder.store(new, pointer, align=4)
        most = new  # after four turns every lane has the maximum
        for turn in (8, 4, 2, 1):
            order = ir.Constant(vector, [(i + turn) % _LANES for i in range(_LANES)])
            turned = builder.shuffle_vector(most, undefined, order)
            most = builder.select(builder.icmp_unsigned(">", most, turned), most, turned)
        equal = builder.bitcast(builder.icmp_unsigned("==", new, most), ir.IntType(_LANES))
        found = builder.cttz(builder.zext(equal, ir.IntType(64)), ir.Constant(ir.IntType(1), 1))
        value = builder.extract_element(most, ir.Constant(ir.IntType(32), 0))
        both = [builder.zext(value, ir.IntType(64)), found]
        return context.make_tuple(builder, result, both)

    return result(values, types.uint64, types.uint64, types.uint32, keep), codegen


@kernel_jit
def _exchange(stack: Any, g: Any, slot: Any, value: Any) -> None:
    """Write a nearer next use into the slot of the group's farthest, and find the next farthest."""
    nexts, chunk_max, lane_of, first_chunk, first_row, n_rows, farthest, farthest_at, keep = stack
    lanes = np.uint64(_LANES)
    chunk = slot >> np.uint64(4)
    most, lane = _lower(nexts, chunk, slot & np.uint64(15), np.uint32(value), keep)
    lane_of[chunk] = lane
    row0 = first_row[g]
    skip = row0 * lanes - first_chunk[g]  # from a chunk to its maximum
    row = (chunk + skip) >> np.uint64(4)
    best, lane = _lower(chunk_max, row, (chunk + skip) & np.uint64(15), np.uint32(most), keep)
    found = row * lanes + lane
    if n_rows[g] > np.uint64(1):
        for other in range(row0, row0 + n_rows[g]):
            if other == row:
                continue
            first = other * lanes
            most, lane = _lower(chunk_max, other, np.uint64(0), chunk_max[first], keep)
            if most > best:
                best = most
                found = first + lane
    found -= skip
    farthest[g] = best
    farthest_at[g] = found * lanes + np.uint64(lane_of[found])


@kernel_jit
def _put(stack: Any, g: Any, slot: Any, value: Any) -> None:
    """Write a next use that is not nearer than what the slot held."""
    nexts, chunk_max, lane_of, first_chunk, first_row, _, farthest, farthest_at, _ = stack
    nexts[slot] = value
    chunk = slot >> np.uint64(4)
    place = chunk + first_row[g] * np.uint64(_LANES) - first_chunk[g]
    if value > chunk_max[place]:
        chunk_max[place] = value
        lane_of[chunk] = slot & np.uint64(15)
        if value > farthest[g]:
            farthest[g] = value
            farthest_at[g] = slot


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
    room: Any,
    used: Any,
    slot_of: Any,
    levels: Any,
) -> None:
    """Write the level of each lookup of one pool in sets ``first`` up to ``until``.

    Args:
        set_layer, offsets, experts, next_use: as in kernel.py. cached: bool [sets], on the cached
            path. every_pick: each lookup is a set of its own.
        stack: (next uses: uint32 [slots], 0 where empty; maxima of chunks: uint32, rows of 16;
            their lanes: uint8 [chunks]; each group's first chunk, first row, rows: uint64; its
            maximum: uint32, where: uint64; KEEP).
        owner: int32 [slots]. group_of_chunk: uint16 [chunks]. room, used: int64 [groups].
        slot_of: int32 [keys], -1 outside.
        levels: uint16 [lookups], written.
    """
    first_chunk, farthest, farthest_at = stack[3], stack[6], stack[7]
    groups = len(room)
    lanes = np.uint64(_LANES)
    for s in range(first, until):
        layer = index_in_group[set_layer[s]]
        if layer < 0:
            continue
        base = np.uint32(layer * n_expert)
        begin = offsets[s]
        end = offsets[s + 1]
        for i in range(np.uint64(begin), np.uint64(end)):
            slot = slot_of[np.uint32(base + experts[i])]
            levels[i] = groups if slot < 0 else group_of_chunk[np.uint64(slot) >> np.uint64(4)]
        if not cached[s]:
            continue
        step = 1 if every_pick else end - begin
        for start in range(begin, end, step):
            for i in range(np.uint64(start), np.uint64(start + step)):
                key = np.uint32(base + experts[i])
                old = slot_of[key]
                home: Any = groups  # the group to fill up to
                if old >= 0:
                    home = np.int64(group_of_chunk[np.uint64(old) >> np.uint64(4)])
                if every_pick:
                    levels[i] = home  # an earlier pick of the row may have moved it
                if home == 0:
                    continue
                moving: Any = np.int64(key)
                value = np.uint32(i)
                g = np.uint64(0)
                while np.int64(g) < home:
                    if used[g] < room[g]:  # only keys that were outside come to a free place
                        slot = first_chunk[g] * lanes + np.uint64(used[g])
                        used[g] += 1
                        owner[slot] = moving
                        slot_of[np.uint64(moving)] = slot
                        _put(stack, g, slot, value)
                        moving = -1
                        break
                    if farthest[g] > value:
                        slot = farthest_at[g]
                        pushed = farthest[g]
                        _exchange(stack, g, slot, value)
                        value = pushed
                        gone = owner[slot]
                        owner[slot] = moving
                        slot_of[np.uint64(moving)] = slot
                        moving = np.int64(gone)
                    g += np.uint64(1)
                if moving >= 0:
                    slot_of[np.uint64(moving)] = old
                    if old >= 0:
                        owner[np.uint64(old)] = moving
                        _put(stack, g, np.uint64(old), value)
            for i in range(np.uint64(start), np.uint64(start + step)):
                slot = np.uint64(slot_of[np.uint32(base + experts[i])])
                _put(stack, np.uint64(0), slot, np.uint32(next_use[i]))


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
        chunks = -(-room // _LANES)
        rows = -(-chunks // _LANES)
        stack = (
            np.zeros(chunks.sum() * _LANES, np.uint32),
            np.zeros(rows.sum() * _LANES, np.uint32),
            np.zeros(chunks.sum(), np.uint8),
            (np.cumsum(chunks) - chunks).astype(np.uint64),
            (np.cumsum(rows) - rows).astype(np.uint64),
            rows.astype(np.uint64),
            np.zeros(len(room), np.uint32),
            np.zeros(len(room), np.uint64),
            KEEP,
        )
        self._sets = (
            set_layer, offsets, experts, next_use, cached, index_in_group, n_expert, every_pick,
        )  # fmt: skip
        self._state = (
            stack,
            np.zeros(len(stack[0]), np.int32),
            np.repeat(np.arange(len(room)), chunks).astype(np.uint16),
            room,
            np.zeros(len(room), np.int64),
            np.full(keys, -1, np.int32),
        )
        self._levels = levels

    def run(self, first: int, until: int) -> None:
        """Go on with sets ``first`` up to ``until``."""
        _levels(first, until, *self._sets, *self._state, self._levels)
