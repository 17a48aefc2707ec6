"""What makes rows a trace: their order, their ranges and distinct picks; shared by all who read.

Every check raises TraceError naming the first bad row. Rows are taken in blocks that fit the
processor's cache: the checks cost less than decoding the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.errors import TraceError
from simlab.trace.schema import Trace

_BLOCK = 1 << 15
#: Rows at most this wide are compared pick by pick; wider ones are sorted first.
_PAIRWISE = 20

#: Says where a row is: "row 17 (request 0, token 3, layer 5)".
Where = Callable[[int], str]


def row_name(
    request: npt.NDArray[Any], token: npt.NDArray[Any], layer: npt.NDArray[Any], first_row: int = 0
) -> Where:
    """A function that names a row by number (``first_row`` added), request, token and layer."""

    def name(row: int) -> str:
        return (
            f"row {first_row + row} (request {request[row]}, token {token[row]},"
            f" layer {layer[row]})"
        )

    return name


def check_order(
    request: npt.NDArray[np.int32],
    token: npt.NDArray[np.int32],
    phase: npt.NDArray[np.uint8],
    layer: npt.NDArray[np.int16],
    first_row: int = 0,
) -> None:
    """Rows ascend strictly by (request, token, layer), and a token's rows agree on the phase.

    Pieces of a trace are checked with one row of overlap.
    """
    for start in range(0, max(len(request) - 1, 0), _BLOCK):
        part = slice(start, start + _BLOCK + 1)
        # request and token are not negative, so one signed 64-bit number orders both
        place = request[part].astype(np.int64)
        place <<= 32
        place |= token[part]
        ahead = np.diff(place)
        rows = layer[part]
        same = ahead == 0
        bad = (ahead < 0) | (same & (rows[1:] <= rows[:-1]))
        if bad.any():
            row = start + int(bad.argmax()) + 1
            where = row_name(request, token, layer, first_row)(row)
            if same[row - 1 - start] and layer[row] == layer[row - 1]:
                raise TraceError(f"two rows for one (request, token, layer), the second is {where}")
            raise TraceError(
                f"rows are not sorted by (request, token, layer), first at {where};"
                " 'simlab import' sorts them"
            )
        part_phase = phase[part]
        mixed = same & (part_phase[1:] != part_phase[:-1])
        if mixed.any():
            row = start + int(mixed.argmax()) + 1
            where = row_name(request, token, layer, first_row)(row)
            raise TraceError(f"{where} is of another phase than the row before it of that token")


def _repeats(picks: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_] | None:
    """Rows [n] of picks [n, k] that hold an id twice; None when there is none."""
    k = picks.shape[1]
    if k > _PAIRWISE:
        ordered = np.sort(picks, axis=1)
        found = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        return found if found.any() else None
    columns = np.ascontiguousarray(picks.T)
    rows: npt.NDArray[np.bool_] | None = None
    for shift in range(1, k):
        equal = columns[shift:] == columns[:-shift]
        if equal.any():
            found = equal.any(axis=0)
            rows = found if rows is None else rows | found
    return rows


def check_picks(
    experts: npt.NDArray[np.uint16],
    lengths: npt.NDArray[np.uint16],
    n_expert: int,
    k: int,
    where: Where,
) -> None:
    """Ids are below ``n_expert``, no row holds one twice, no row is longer than ``k``.

    Args:
        experts: uint16 [P]; lengths: uint16 [R], picks of each row, summing to P.
        where: names a row for the message.
    """
    if not len(lengths):
        return
    longest = int(lengths.max())
    if longest > k:
        row = int((lengths > k).argmax())
        raise TraceError(f"{where(row)} has {lengths[row]} picks, more than the trace's k = {k}")
    if len(experts) and int(experts.max()) >= n_expert:
        pick = int((experts >= n_expert).argmax())
        row = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), pick, side="right"))
        raise TraceError(
            f"{where(row)} picks expert {experts[pick]}, but n_expert is {n_expert}"
            f" (ids are 0..{n_expert - 1})"
        )
    if longest < 2:
        return
    if longest == int(lengths.min()):
        picks = experts.reshape(-1, longest)
        for start in range(0, len(picks), _BLOCK):
            _refuse_repeats(picks[start : start + _BLOCK], None, start, where)
        return
    begin = np.cumsum(lengths, dtype=np.int64) - lengths
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        for start in range(0, len(rows) if length > 1 else 0, _BLOCK):
            block = rows[start : start + _BLOCK]
            _refuse_repeats(experts[begin[block, None] + np.arange(length)], block, 0, where)


def _refuse_repeats(
    picks: npt.NDArray[np.uint16], rows: npt.NDArray[np.int64] | None, first: int, where: Where
) -> None:
    found = _repeats(picks)
    if found is None:
        return
    at = int(found.argmax())
    ids, counts = np.unique(picks[at], return_counts=True)
    row = first + at if rows is None else int(rows[at])
    raise TraceError(
        f"{where(row)} picks expert {ids[counts > 1][0]} more than once; a router's picks are"
        " distinct (padding or a damaged dump?)"
    )


def check_layers(layer: npt.NDArray[np.int16], moe_layers: tuple[int, ...], where: Where) -> None:
    """Every row is of a layer that the metadata names."""
    known = np.zeros(1 << 15, dtype=np.bool_)
    known[list(moe_layers)] = True
    fits = known[layer]
    if not fits.all():
        row = int((~fits).argmax())
        raise TraceError(f"{where(row)} is not of a MoE layer that the metadata names")


def layers_seen(layer: npt.NDArray[np.int16]) -> tuple[int, ...]:
    """The distinct layer numbers, ascending."""
    seen = np.zeros(1 << 15, dtype=np.bool_)
    seen[layer] = True
    return tuple(int(x) for x in np.flatnonzero(seen))


def check_trace(trace: Trace) -> None:
    """All checks on a trace in memory, its arrays' shapes, types and metadata included."""
    trace.meta.check()
    rows = trace.n_rows
    if not rows or not trace.n_picks:
        raise TraceError("the trace is empty: it holds no pick")
    shapes: dict[str, tuple[npt.NDArray[Any] | None, Any, int]] = {
        "request": (trace.request, np.int32, rows),
        "token": (trace.token, np.int32, rows),
        "phase": (trace.phase, np.uint8, rows),
        "layer": (trace.layer, np.int16, rows),
        "offsets": (trace.offsets, np.int64, rows + 1),
        "experts": (trace.experts, np.uint16, trace.n_picks),
        "weights": (trace.weights, np.float16, trace.n_picks),
        "step": (trace.step, np.int32, rows),
    }
    for name, (array, dtype, size) in shapes.items():
        if array is None:
            continue
        if array.dtype != dtype or array.shape != (size,):
            raise TraceError(
                f"{name} must be {np.dtype(dtype)} [{size}], not {array.dtype} {list(array.shape)}"
            )
        if array.dtype.kind == "i" and int(array.min()) < 0:
            raise TraceError(f"{name} is negative at row {int((array < 0).argmax())}")
    if int(trace.phase.max()) > 1:
        raise TraceError(f"phase is not 0 or 1 at row {int((trace.phase > 1).argmax())}")
    lengths = np.diff(trace.offsets)
    if trace.offsets[0] != 0 or trace.offsets[-1] != trace.n_picks or int(lengths.min()) < 0:
        raise TraceError("offsets must ascend from 0 to the number of picks")
    if int(lengths.max()) > 65535:
        raise TraceError("a row has more than 65535 picks")
    where = row_name(trace.request, trace.token, trace.layer)
    check_layers(trace.layer, trace.meta.moe_layers, where)
    check_order(trace.request, trace.token, trace.phase, trace.layer)
    check_picks(trace.experts, lengths.astype(np.uint16), trace.meta.n_expert, trace.meta.k, where)
