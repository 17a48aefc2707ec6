"""Traces as Arrow tables and back; the one place that knows the columns' Arrow types.

Writing uses exactly the format's types. Reading takes any integer and any list type, and checks
what numpy arrays cannot express: absent cells, negative numbers, numbers too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from simlab.errors import TraceError
from simlab.trace.schema import DECODE, Trace, TraceMeta

_REQUIRED = ("request", "token", "layer", "experts")
#: Every column that simlab knows; others are ignored.
COLUMNS = ("request", "token", "phase", "layer", "experts", "weights", "step")
#: Rows of one row group and one record batch: about a million picks, so that threads share a file.
BATCH_ROWS = 1 << 17


class Rows(NamedTuple):
    """Rows as numpy arrays; like Trace, but with row lengths in place of offsets.

    ``lengths`` uint16 [R]; the other fields have Trace's types.
    """

    request: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]
    phase: npt.NDArray[np.uint8]
    layer: npt.NDArray[np.int16]
    lengths: npt.NDArray[np.uint16]
    experts: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float16] | None
    step: npt.NDArray[np.int32] | None


def schema(*, weights: bool, step: bool) -> pa.Schema:
    """The Arrow schema of the format. No cell may be absent: it decodes faster and says more."""

    def listed(kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("element", kind, nullable=False))

    kinds: dict[str, pa.DataType] = {
        "request": pa.int32(),
        "token": pa.int32(),
        "phase": pa.uint8(),
        "layer": pa.int16(),
        "experts": listed(pa.uint16()),
    }
    if weights:
        kinds["weights"] = listed(pa.float16())
    if step:
        kinds["step"] = pa.int32()
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def to_batch(rows: Rows) -> pa.RecordBatch:
    """Rows as one record batch; less than 2**31 picks."""
    offsets = np.zeros(len(rows.request) + 1, dtype=np.int32)
    np.cumsum(rows.lengths, out=offsets[1:])
    kinds = schema(weights=rows.weights is not None, step=rows.step is not None)
    arrays: list[pa.Array] = []
    for kind in kinds:
        column = to_array(getattr(rows, kind.name))
        if pa.types.is_list(kind.type):
            column = pa.ListArray.from_arrays(to_array(offsets), column, type=kind.type)
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=kinds)


def batches_of(trace: Trace, size: int = BATCH_ROWS) -> Iterator[Rows]:
    """The trace in pieces of at most ``size`` rows, without copying."""
    for start in range(0, trace.n_rows, size):
        part = slice(start, min(start + size, trace.n_rows))
        picks = slice(int(trace.offsets[part.start]), int(trace.offsets[part.stop]))
        yield Rows(
            request=trace.request[part],
            token=trace.token[part],
            phase=trace.phase[part],
            layer=trace.layer[part],
            lengths=np.diff(trace.offsets[part.start : part.stop + 1]).astype(np.uint16),
            experts=trace.experts[picks],
            weights=None if trace.weights is None else trace.weights[picks],
            step=None if trace.step is None else trace.step[part],
        )


def to_arrow(trace: Trace) -> pa.Table:
    """The trace as an Arrow table in the format's types."""
    kinds = schema(weights=trace.weights is not None, step=trace.step is not None)
    return pa.Table.from_batches([to_batch(rows) for rows in batches_of(trace)], schema=kinds)


def from_arrow(table: pa.Table, meta: TraceMeta, *, phase: int = DECODE) -> Trace:
    """A Trace of a table's rows, in the table's order; only the types are checked.

    Args:
        table: columns by name, see rows_of.
        phase: what every row is when the table has no column ``phase``.

    Raises:
        TraceError: a column is missing or does not hold what it must.
    """
    # copied where Arrow's memory is shared, which is read-only: all traces have arrays of one type
    return trace_of(_map(rows_of(table, phase=phase), _writable, _writable), meta)


def _writable(column: Any) -> Any:
    return np.require(column, requirements="W")


def join_rows(pieces: Sequence[Rows]) -> Rows:
    """Pieces one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    columns = zip(*pieces, strict=True)
    return Rows(*(None if c[0] is None else np.concatenate(c) for c in columns))  # type: ignore[arg-type]


def slice_rows(rows: Rows, start: int, stop: int) -> Rows:
    """Rows ``start`` to ``stop``, without copying."""
    first = int(rows.lengths[:start].sum(dtype=np.int64))
    picks = slice(first, first + int(rows.lengths[start:stop].sum(dtype=np.int64)))
    return _map(rows, lambda column: column[start:stop], lambda flat: flat[picks])


def take_rows(rows: Rows, index: npt.NDArray[np.int64]) -> Rows:
    """The rows of ``index``, in its order, copied."""
    lengths = rows.lengths[index].astype(np.int64)
    begin = (np.cumsum(rows.lengths, dtype=np.int64) - rows.lengths)[index]
    # pick p of the result is pick begin[r] + (p - its row's first pick in the result)
    picks = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
    picks += np.arange(len(picks))
    return _map(rows, lambda column: column[index], lambda flat: flat[picks])


def sort_rows(rows: Rows) -> Rows:
    """The rows in the order (request, token, layer); rows of one place keep their order."""
    place = rows.request.astype(np.int64)
    place <<= 32
    place |= rows.token
    ahead = np.diff(place)
    if not ((ahead < 0) | ((ahead == 0) & (np.diff(rows.layer) < 0))).any():
        return rows
    return take_rows(rows, np.lexsort((rows.layer, place)))


def _map(rows: Rows, on_rows: Callable[[Any], Any], on_picks: Callable[[Any], Any]) -> Rows:
    return Rows(
        request=on_rows(rows.request),
        token=on_rows(rows.token),
        phase=on_rows(rows.phase),
        layer=on_rows(rows.layer),
        lengths=on_rows(rows.lengths),
        experts=on_picks(rows.experts),
        weights=None if rows.weights is None else on_picks(rows.weights),
        step=None if rows.step is None else on_rows(rows.step),
    )


def trace_of(rows: Rows, meta: TraceMeta) -> Trace:
    """The rows as a Trace (nothing is checked)."""
    return Trace(meta=meta, offsets=offsets_of(rows.lengths), **_shared(rows))


def _shared(rows: Rows) -> dict[str, Any]:
    return {name: value for name, value in rows._asdict().items() if name != "lengths"}


def offsets_of(lengths: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Row offsets int64 [R + 1] of row lengths [R]."""
    if len(lengths) and lengths.min() == lengths.max():
        length = int(lengths[0])
        if length:
            return np.arange(0, length * len(lengths) + 1, length, dtype=np.int64)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def rows_of(table: pa.Table, *, phase: int = DECODE, first_row: int = 0) -> Rows:
    """The known columns of a table as numpy arrays.

    Args:
        table: ``request token layer experts`` and optionally ``phase weights step``, integers and
            lists of any width and kind; unknown columns are ignored.
        phase: what every row is when there is no column ``phase``.
        first_row: added to the row numbers in messages.

    Raises:
        TraceError: a column is missing or of a wrong type, or a cell is absent, negative or too
            large.
    """
    names = table.column_names
    check_columns(names)
    request = _integers(table, "request", np.int32, first_row)
    lengths, experts = _lists(table, "experts", first_row)
    weights = None
    if "weights" in names:
        weight_lengths, weights = _lists(table, "weights", first_row)
        if not np.array_equal(weight_lengths, lengths):
            row = int((weight_lengths != lengths).argmax()) + first_row
            raise TraceError(f"row {row} has not as many weights as experts")
    return Rows(
        request=request,
        token=_integers(table, "token", np.int32, first_row),
        phase=_integers(table, "phase", np.uint8, first_row, top=1)
        if "phase" in names
        else np.full(len(request), phase, dtype=np.uint8),
        layer=_integers(table, "layer", np.int16, first_row),
        lengths=lengths,
        experts=experts,
        weights=weights,
        step=_integers(table, "step", np.int32, first_row) if "step" in names else None,
    )


def check_columns(names: list[str]) -> None:
    """Refuse a table without the columns that make a trace, or with one of them twice."""
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        raise TraceError(
            f"it has no column {missing[0]!r} (a trace has {', '.join(_REQUIRED)}; found:"
            f" {', '.join(map(repr, names[:8])) or 'none'})"
        )
    twice = [name for name in COLUMNS if names.count(name) > 1]
    if twice:
        raise TraceError(f"it has the column {twice[0]!r} more than once")


# Arrays pass between the libraries as buffers: pa.array() and to_numpy() would import pandas, which
# takes as long as opening a large trace.


def to_array(column: npt.NDArray[Any]) -> pa.Array:
    """A numpy array of a plain number type as an Arrow array, without copying."""
    kind = pa.from_numpy_dtype(column.dtype)
    data = pa.py_buffer(np.ascontiguousarray(column))
    return pa.Array.from_buffers(kind, len(column), [None, data])


def to_numpy(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[Any]:
    """An integer or float column without absent cells as numpy, copied only if in pieces."""
    letter = "f" if pa.types.is_floating(column.type) else str(column.type)[0]
    dtype = np.dtype(f"{letter}{column.type.bit_width // 8}")
    arrays = [np.zeros(0, dtype)]
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        if len(chunk):
            data = chunk.buffers()[1]
            arrays.append(np.frombuffer(data, dtype, len(chunk), chunk.offset * dtype.itemsize))
    return arrays[1] if len(arrays) == 2 else np.concatenate(arrays)


def _first_null(column: pa.ChunkedArray | pa.Array) -> int:
    """Index of the first absent cell of a column that has one."""
    import pyarrow.compute as pc  # not at the top: importing it takes a while

    return int(pc.index(pc.is_null(column), True).as_py())


def _narrow(
    values: npt.NDArray[Any], dtype: type[np.integer[Any]], top: int, complain: Any
) -> npt.NDArray[Any]:
    """Integers as ``dtype``, refused outside 0..top; ``complain(index, text)`` makes the error."""
    if len(values):
        if values.dtype.kind == "i" and values.min() < 0:
            at = int((values < 0).argmax())
            raise complain(at, f"is negative ({values[at]})")
        if np.iinfo(values.dtype).max > top and values.max() > top:
            at = int((values > top).argmax())
            raise complain(at, f"is {values[at]}, the most is {top}")
    return values if values.dtype == dtype else values.astype(dtype)


def _integers(
    table: pa.Table, name: str, dtype: type[np.integer[Any]], first_row: int, top: int | None = None
) -> npt.NDArray[Any]:
    column = table.column(name)
    if not pa.types.is_integer(column.type):
        raise TraceError(f"column {name!r} holds {column.type}, not integers")
    if column.null_count:
        row = _first_null(column) + first_row
        raise TraceError(f"column {name!r} has no value at row {row}")

    def complain(at: int, text: str) -> TraceError:
        return TraceError(f"{name} {text} at row {first_row + at}")

    limit = int(np.iinfo(dtype).max) if top is None else top
    return _narrow(to_numpy(column), dtype, limit, complain)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _parts_of(chunk: pa.Array) -> tuple[npt.NDArray[Any], pa.Array]:
    """Row lengths and values of lists none of which is absent."""
    if pa.types.is_fixed_size_list(chunk.type):
        size = chunk.type.list_size
        lengths = np.full(len(chunk), size, dtype=np.int32)
        return lengths, chunk.values.slice(chunk.offset * size, len(chunk) * size)
    offsets = to_numpy(chunk.offsets)
    return np.diff(offsets), chunk.values.slice(offsets[0], offsets[-1] - offsets[0])


def _lists(
    table: pa.Table, name: str, first_row: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[Any]]:
    """Row lengths and flat values of a list column: integers as uint16, weights as float16."""
    column = table.column(name)
    wanted = "integers" if name == "experts" else "floating-point numbers"
    fits = pa.types.is_integer if name == "experts" else pa.types.is_floating
    if not _is_list(column.type) or not fits(column.type.value_type):
        raise TraceError(f"column {name!r} holds {column.type}, not lists of {wanted}")
    if column.null_count:
        row = _first_null(column) + first_row
        raise TraceError(f"column {name!r} has no list at row {row}")
    parts = [_parts_of(chunk) for chunk in column.chunks if len(chunk)]
    values = pa.chunked_array([part for _, part in parts], type=column.type.value_type)
    if len(parts) == 1:
        lengths = parts[0][0]
    else:
        lengths = np.concatenate([np.zeros(0, np.int32), *(part for part, _ in parts)])

    def row_of(at: int) -> int:
        ends = np.cumsum(lengths, dtype=np.int64)
        return int(np.searchsorted(ends, at, side="right")) + first_row

    if values.null_count:
        at = _first_null(values)
        raise TraceError(f"{name} has an absent number in its list at row {row_of(at)}")

    def too_long(at: int, text: str) -> TraceError:
        return TraceError(f"the number of {name} {text} at row {first_row + at}")

    short = _narrow(lengths, np.uint16, 65535, too_long)
    flat = to_numpy(values)
    if name != "experts":
        with np.errstate(over="ignore"):
            return short, flat.astype(np.float16, copy=False)

    def complain(at: int, text: str) -> TraceError:
        return TraceError(f"an expert id {text} at row {row_of(at)}")

    return short, _narrow(flat, np.uint16, 65535, complain)
