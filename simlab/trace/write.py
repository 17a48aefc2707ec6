"""Writing trace files: whole traces, and piece by piece through a stream that survives a kill.

A capture or a generator appends to an Arrow IPC stream beside the target; `TraceWriter.close` turns
it into Parquet. What was flushed before a kill is got back by `recover_trace`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from simlab.errors import TraceError
from simlab.trace.arrow import (
    BATCH_ROWS,
    Rows,
    batches_of,
    join_rows,
    rows_of,
    schema,
    slice_rows,
    sort_rows,
    to_array,
    to_batch,
)
from simlab.trace.schema import METADATA_KEY, Trace, TraceMeta
from simlab.trace.sink import parquet_sink, reason_of
from simlab.trace.validate import check_layers, check_order, check_picks, check_trace, row_name
from simlab.whole_file import check_place

#: Appended to the target's name while it is being written piece by piece.
STREAM_SUFFIX = ".part.arrows"
_FLUSH_SECONDS = 1.0


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> TraceMeta:
    """Check a trace and write it to ``path``; the file appears complete or not at all.

    Returns:
        The metadata as stored, with the content hash.

    Raises:
        TraceError: the trace is not valid (unsorted rows, repeated ids...) or cannot be written.
    """
    check_trace(trace)
    with parquet_sink(
        Path(path), weights=trace.weights is not None, step=trace.step is not None
    ) as sink:
        for rows in batches_of(trace):
            sink.write(rows)
        return sink.finish(trace.meta)


class TraceWriter:
    """Writes a trace that arrives in pieces; a context manager.

    Every piece is checked and is on its way to the disk within a second, in
    ``<path>.part.arrows``. `close` makes the Parquet file and removes the stream. Memory stays
    bounded while the pieces came in the order (request, token, layer), or requests began in order;
    what came beside an unfinished request is then sorted in memory. When the block ends by an
    exception, or the process is killed, the stream stays and `recover_trace` reads it.

    Args:
        path: the Parquet file to be.
        meta: what is known at the start; it travels in the stream. ``k`` is the most picks a row
            may have, ``moe_layers`` all layers that may come.
        weights, step: whether the optional columns are written; every append then brings them.

    Raises:
        TraceError: there is an unfinished stream of that name already, or no such folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: TraceMeta,
        *,
        weights: bool = False,
        step: bool = False,
    ) -> None:
        meta.check()
        self.path = Path(path)
        self.meta = meta
        self.stream_path = self.path.with_name(self.path.name + STREAM_SUFFIX)
        self.rows_written = 0
        self._waiting: list[Rows] = []
        self._waiting_rows = 0
        self._flushed = 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()
        check_place(self.path)
        kinds = schema(weights=weights, step=step)
        self._columns = set(kinds.names)
        try:
            # unbuffered: what was written is the operating system's, and can be cut back
            self._file = open(self.stream_path, "xb", buffering=0)
        except FileExistsError:
            raise TraceError(
                f"{self.stream_path} is left from an unfinished run: save it with 'simlab trace"
                f" recover {self.stream_path}', or delete it"
            ) from None
        except OSError as exc:
            raise TraceError(f"cannot write {self.stream_path}: {reason_of(exc)}") from None
        described = kinds.with_metadata({METADATA_KEY: meta.to_json().encode()})
        try:
            self._put(described.serialize())
        except BaseException:
            # nothing is in it yet: leave nothing behind
            self._file.close()
            self.stream_path.unlink(missing_ok=True)
            raise

    def append(
        self,
        request: npt.ArrayLike,
        token: npt.ArrayLike,
        phase: npt.ArrayLike,
        layer: npt.ArrayLike,
        experts: npt.ArrayLike,
        lengths: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        step: npt.ArrayLike | None = None,
    ) -> None:
        """Add rows.

        Args:
            request, token, phase, layer, step: integers [R]; a single number stands for all rows.
            experts: integers [R, k], or [P] with ``lengths`` [R].
            weights: floats of the shape of ``experts``.

        Raises:
            TraceError: the rows are not valid, or cannot be written (full disk).
        """
        rows = _piece(request, token, phase, layer, experts, lengths, weights, step)
        given = {name for name, value in rows._asdict().items() if value is not None}
        if given - {"lengths"} != self._columns:
            raise TraceError(f"this writer takes the columns {', '.join(sorted(self._columns))}")
        if not len(rows.request):
            return
        where = row_name(rows.request, rows.token, rows.layer, self.rows_written)
        check_layers(rows.layer, self.meta.moe_layers, where)
        check_picks(rows.experts, rows.lengths, self.meta.n_expert, self.meta.k, where)
        with self._lock:
            self._waiting.append(rows)
            self._waiting_rows += len(rows.request)
            self.rows_written += len(rows.request)
            late = self._flushed + _FLUSH_SECONDS - time.monotonic()
            if late <= 0 or self._waiting_rows >= BATCH_ROWS:
                self.flush()
            elif self._timer is None:
                self._timer = threading.Timer(late, self._flush_late)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Hand all rows to the operating system: a kill does not lose them any more."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            waiting, self._waiting, self._waiting_rows = self._waiting, [], 0
            self._flushed = time.monotonic()
            if not waiting:
                return
            try:
                self._put(to_batch(join_rows(waiting)).serialize())
            except TraceError:
                self._waiting, self._waiting_rows = waiting, sum(len(r.request) for r in waiting)
                raise

    def _put(self, message: pa.Buffer) -> None:
        """One message of the stream, whole or not at all."""
        start = self._file.tell()
        left = memoryview(message)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as exc:
            with suppress(OSError):
                self._file.truncate(start)
                self._file.seek(start)
            raise TraceError(f"cannot write {self.stream_path}: {reason_of(exc)}") from None

    def _flush_late(self) -> None:
        # a failure shows at the next append or at close, in the caller's own thread
        with self._lock, suppress(TraceError):
            if self._timer is not None:
                self.flush()

    def close(self, **changes: Any) -> TraceMeta:
        """Write the Parquet file and remove the stream.

        Args:
            changes: fields of the metadata that were not known at the start.

        Returns:
            The metadata as stored.
        """
        self.flush()
        self._file.close()
        if not self.rows_written:
            self.stream_path.unlink(missing_ok=True)
            raise TraceError(f"{self.path} was not written: there are no rows")
        try:
            meta = _convert(self.stream_path, self.path, changes, whole=True)
        except TraceError as exc:
            raise TraceError(f"{exc}; the rows are kept in {self.stream_path}") from None
        self.stream_path.unlink(missing_ok=True)
        return meta

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file.closed:
            return
        if kind is None:
            self.close()
            return
        with suppress(TraceError):
            self.flush()
        self._file.close()
        if not self.rows_written:
            self.stream_path.unlink(missing_ok=True)


def _piece(
    request: npt.ArrayLike,
    token: npt.ArrayLike,
    phase: npt.ArrayLike,
    layer: npt.ArrayLike,
    experts: npt.ArrayLike,
    lengths: npt.ArrayLike | None,
    weights: npt.ArrayLike | None,
    step: npt.ArrayLike | None,
) -> Rows:
    """The arguments of an append as Rows with the format's types, through rows_of's checks."""
    picks = _numbers("experts", experts)
    sizes = (
        np.full(picks.shape[:1], picks.shape[-1])
        if lengths is None
        else _numbers("lengths", lengths)
    )
    if picks.ndim != (2 if lengths is None else 1) or sizes.sum() != picks.size:
        raise TraceError("experts must be [rows, k], or flat with the length of each row")
    offsets = to_array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
    columns: dict[str, pa.Array] = {}
    per_row = {"request": request, "token": token, "phase": phase, "layer": layer, "step": step}
    for name, value in per_row.items():
        if value is not None:
            column = _numbers(name, value)
            if column.shape not in ((), (1,), sizes.shape):
                raise TraceError(f"{name} has {len(column)} rows, experts {len(sizes)}")
            columns[name] = to_array(np.broadcast_to(column, sizes.shape))
    for name, value in (("experts", picks), ("weights", weights)):
        if value is not None:
            flat = _numbers(name, value).reshape(-1)
            if flat.size != picks.size:
                raise TraceError("weights must have the shape of experts")
            columns[name] = pa.ListArray.from_arrays(offsets, to_array(flat))
    return rows_of(pa.table(columns))


def _numbers(name: str, value: npt.ArrayLike) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise TraceError(f"{name} must be numbers, not {array.dtype}")
    return array


def recover_trace(stream_path: str | os.PathLike[str], out: str | os.PathLike[str]) -> TraceMeta:
    """Make a trace of what an interrupted capture had flushed; its metadata says ``partial``.

    Args:
        stream_path: the ``.part.arrows`` file, possibly cut anywhere; it is left as it is.
        out: the Parquet file to be.

    Raises:
        TraceError: it is not such a stream, or holds no complete piece.
    """
    return _convert(Path(stream_path), Path(out), {"partial": True}, whole=False)


def _convert(source: Path, out: Path, changes: dict[str, Any], *, whole: bool) -> TraceMeta:
    """Stream file to Parquet, batch by batch if the rows are in order, else sorted by request."""
    meta, kinds = _stream_head(source)
    meta = meta.with_(**changes)
    last: Rows | None = None
    in_order = True
    total = 0
    for rows in _stream_rows(source, whole):
        total += len(rows.request)
        if in_order:
            piece = rows if last is None else join_rows([last, rows])
            try:
                check_order(piece.request, piece.token, piece.phase, piece.layer)
            except TraceError:
                in_order = False
        last = slice_rows(rows, len(rows.request) - 1, len(rows.request))
    if not total:
        raise TraceError(f"{source} holds no complete piece of a trace: nothing to save")
    pieces = _stream_rows(source, whole) if in_order else _by_request(source, whole)
    meta.check()
    with parquet_sink(out, weights="weights" in kinds.names, step="step" in kinds.names) as sink:
        for rows in _full_batches(pieces):
            where = row_name(rows.request, rows.token, rows.layer)
            check_layers(rows.layer, meta.moe_layers, where)
            check_picks(rows.experts, rows.lengths, meta.n_expert, meta.k, where)
            sink.write(rows)
        return sink.finish(meta)


def _stream_head(source: Path) -> tuple[TraceMeta, pa.Schema]:
    if source.exists() and not source.is_file():  # opening a pipe would wait for ever
        raise TraceError(f"cannot read {source}: it is a folder or a device, not a file")
    try:
        with open(source, "rb") as file:
            kinds = pa.ipc.open_stream(file).schema
    except OSError as exc:
        raise TraceError(f"cannot read {source}: {reason_of(exc)}") from None
    except (pa.ArrowException, ValueError, MemoryError):
        raise TraceError(
            f"{source} is not an unfinished capture (a '{STREAM_SUFFIX}' file)"
        ) from None
    text = (kinds.metadata or {}).get(METADATA_KEY)
    if text is None:
        raise TraceError(f"{source} is an Arrow stream, but not of a simlab trace")
    return TraceMeta.from_json(text), kinds


def _stream_rows(source: Path, whole: bool) -> Iterator[Rows]:
    """The pieces of a stream; with ``whole`` damage is an error, otherwise it is the end."""
    try:
        with open(source, "rb") as file:
            reader = pa.ipc.open_stream(file)
            for batch in reader:
                batch.validate(full=True)
                yield rows_of(pa.Table.from_batches([batch]))
    except (OSError, ValueError, MemoryError, pa.ArrowException) as exc:
        if whole:
            raise TraceError(f"cannot read {source} back: {reason_of(exc)}") from None


def _by_request(source: Path, whole: bool) -> Iterator[Rows]:
    """The rows of a stream request by request, sorted and their order checked.

    Only requests that came beside an unfinished one of a lower number are in memory: with requests
    that are started in order, about as many as ran together.
    """
    last: dict[int, int] = {}  # request -> its last piece
    for number, rows in enumerate(_stream_rows(source, whole)):
        last.update(dict.fromkeys(np.unique(rows.request).tolist(), number))
    waiting: dict[int, list[Rows]] = {}
    left = sorted(last, reverse=True)
    for number, rows in enumerate(_stream_rows(source, whole)):
        rows = sort_rows(rows)
        requests, starts = np.unique(rows.request, return_index=True)
        ends = np.append(starts[1:], len(rows.request))
        for request, start, end in zip(requests.tolist(), starts, ends, strict=True):
            waiting.setdefault(request, []).append(slice_rows(rows, int(start), int(end)))
        while left and last[left[-1]] <= number:
            done = sort_rows(join_rows(waiting.pop(left.pop())))
            check_order(done.request, done.token, done.phase, done.layer)
            yield done


def _full_batches(pieces: Iterable[Rows]) -> Iterator[Rows]:
    """The same rows in pieces of BATCH_ROWS, the last one shorter."""
    waiting: list[Rows] = []
    count = 0
    for rows in pieces:
        waiting.append(rows)
        count += len(rows.request)
        while count >= BATCH_ROWS:
            joined = join_rows(waiting)
            yield slice_rows(joined, 0, BATCH_ROWS)
            waiting = [slice_rows(joined, BATCH_ROWS, count)]
            count -= BATCH_ROWS
    if count:
        yield join_rows(waiting)
