"""Reading trace files, ours and others' of the same columns; every damage is one TraceError.

Row groups are decoded and checked side by side into arrays of the final size, so the memory needed
is the trace plus one row group a thread. The result is cached (see decoded.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from simlab.errors import SimlabError, TraceError, UsageError
from simlab.trace import decoded
from simlab.trace.hash import SEAL_MARK, SEAL_SIZE, hash_columns, seal_of
from simlab.trace.schema import DECODE, METADATA_KEY, Trace, TraceMeta

_MAGIC = b"PAR1"
#: More rows than this for each byte of the file cannot be: a damaged footer.
_MOST_PER_BYTE = 100_000
#: Picks for which room is taken in advance; memory that is not written to costs nothing.
_MOST_ROOM = 1 << 32


def read_trace(
    path: str | os.PathLike[str],
    *,
    n_expert: int | None = None,
    phase: int | None = None,
    cache: bool = True,
) -> Trace:
    """Open a trace, check all of it, and return its arrays.

    Args:
        path: a Parquet file with the columns of the format: found by name, unknown ones ignored,
            any integer and list type. Without a column ``phase`` every row is decode.
        n_expert: experts of a layer; needed for a file without simlab's metadata.
        phase: what every row is when the file has no column ``phase``; decode if not said.
        cache: use and fill the decoded cache.

    Raises:
        UsageError: ``n_expert`` is missing or contradicts the file.
        TraceError: the file is missing, damaged or foreign, or its rows do not make a trace.
    """
    path = Path(path)
    absent = DECODE if phase is None else phase
    with reading(path):
        key = _identity(path, n_expert, absent)
        trace = decoded.load(key) if cache else None
        if trace is None:
            with ThreadPoolExecutor(_threads()) as pool:
                trace = _decode(path, n_expert, absent, pool)
            if cache:
                decoded.save_later(key, trace)
    return trace


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong in the block is a TraceError that names the file (or a UsageError)."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise TraceError(f"it is a {'folder' if path.is_dir() else 'device'}, not a file")
        yield
    except UsageError:
        raise
    except SimlabError as exc:
        raise TraceError(f"cannot use {path}: {exc}") from None
    except MemoryError:
        raise TraceError(f"{path} needs more memory than there is, or is damaged") from None
    except Exception as exc:  # whatever a damaged file makes the Parquet library raise
        system = getattr(exc, "strerror", None)
        reason = system or " ".join(str(exc).split())[:200].rstrip(" :.") or type(exc).__name__
        raise TraceError(
            f"cannot read {path}: {reason}" if system else f"{path} is damaged: {reason}"
        ) from exc


def _threads() -> int:
    try:
        return max(1, min(16, len(os.sched_getaffinity(0))))
    except AttributeError:
        return max(1, min(16, os.cpu_count() or 1))


def _identity(path: Path, n_expert: int | None, phase: int) -> str:
    """The cache key of the file's present state and of the arguments."""
    size, mtime, footer = _footer(path)
    state = [str(path.resolve()), size, mtime, footer, n_expert, phase]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:40]


def _footer(path: Path) -> tuple[int, int, str]:
    """Size, mtime_ns and hash of the footer of a Parquet file; refuses other files."""
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        size = stat.st_size
        if size == 0:
            raise TraceError("the file is empty")
        head = file.read(4)
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if head != _MAGIC:
            if head == b"\xff\xff\xff\xff":
                raise TraceError("it is an Arrow stream; save it with 'simlab trace recover'")
            raise TraceError("it is not a Parquet file; 'simlab import' makes traces of others")
        if tail[4:] != _MAGIC or size < 12 or length > size - 12:
            raise TraceError("the file is cut off or damaged (no Parquet footer at its end)")
        file.seek(max(0, size - 8 - length - SEAL_SIZE))
        end = file.read()
        footer, seal = end[-8 - length :], end[: -8 - length]
        if seal.startswith(SEAL_MARK) and seal != seal_of(footer):
            raise TraceError("the file is damaged: its footer is not what was written")
        return size, stat.st_mtime_ns, hashlib.sha256(footer).hexdigest()


def _decode(path: Path, n_expert: int | None, phase: int, pool: Executor) -> Trace:
    from simlab.trace.arrow import offsets_of
    from simlab.trace.validate import layers_seen

    file = open_parquet(path)
    stored = stored_meta(file.metadata.metadata)
    if stored is None and n_expert is None:
        raise UsageError(
            f"{path} has no simlab metadata: say how many experts a layer has with --n-expert N,"
            " or make a trace of it with 'simlab import'"
        )
    if stored is not None and n_expert is not None and stored.n_expert != n_expert:
        raise UsageError(f"--n-expert {n_expert}: {path} says n_expert = {stored.n_expert}")
    experts = stored.n_expert if stored else n_expert
    assert experts is not None
    if not 1 <= experts <= 65536:
        raise UsageError(f"--n-expert must be 1..65536, not {experts}")
    columns = _decode_columns(path, file, stored, experts, phase, pool)
    lengths = columns["lengths"]
    meta = stored or TraceMeta(
        n_expert=experts,
        k=int(lengths.max()),
        moe_layers=layers_seen(columns["layer"]),
        source=path.name,
    )
    found = hash_columns(columns, pool)
    if meta.content_hash and meta.content_hash != found:
        raise TraceError("the file is damaged: its picks are not those that were written")
    del columns["lengths"]
    return Trace(meta=meta.with_(content_hash=found), offsets=offsets_of(lengths), **columns)


def open_parquet(path: Path) -> Any:
    """The file as a pyarrow ParquetFile that verifies page checksums."""
    _footer(path)
    return _open(path)


def _open(path: Path, metadata: Any = None) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(
        path, metadata=metadata, memory_map=False, page_checksum_verification=True
    )


def stored_meta(pairs: dict[bytes, bytes] | None) -> TraceMeta | None:
    """The trace metadata among a file's key-value pairs; None if there is none."""
    text = (pairs or {}).get(METADATA_KEY)
    return None if text is None else TraceMeta.from_json(text)


def _decode_columns(
    path: Path,
    file: Any,
    stored: TraceMeta | None,
    n_expert: int,
    phase: int,
    pool: Executor,
) -> dict[str, Any]:
    """All rows as checked arrays under the hash's column names."""
    from simlab.trace.arrow import COLUMNS, Rows, check_columns, rows_of
    from simlab.trace.validate import check_layers, check_order, check_picks, row_name

    metadata, names = file.metadata, file.schema_arrow.names
    check_columns(names)
    wanted = [name for name in COLUMNS if name in names]
    rows = group_starts(metadata, path.stat().st_size)
    total = rows[-1]
    if not total:
        raise TraceError("the trace is empty: it holds no row")
    columns: dict[str, Any] = {
        "request": np.empty(total, np.int32),
        "token": np.empty(total, np.int32),
        "phase": np.empty(total, np.uint8),
        "layer": np.empty(total, np.int16),
        "lengths": np.empty(total, np.uint16),
        "step": np.empty(total, np.int32) if "step" in wanted else None,
    }
    # picks go to their final place if every row has k of them; how many there are is not known
    # before they are decoded (the library's access to column metadata does not survive damage)
    k = stored.k if stored else n_expert
    room = total * k if stored and total * k <= _MOST_ROOM else 0
    flat = {"experts": np.empty(room, np.uint16), "weights": np.empty(room, np.float16)}

    def decode(group: int) -> Rows:
        first, stop = rows[group], rows[group + 1]
        table = _open(path, metadata).read_row_group(group, columns=wanted, use_threads=False)
        if table.num_rows != stop - first:
            raise TraceError("the file is damaged: a row group has not the rows it announces")
        part = rows_of(table, phase=phase, first_row=first)
        where = row_name(part.request, part.token, part.layer, first)
        check_picks(part.experts, part.lengths, n_expert, k, where)
        if stored:
            check_layers(part.layer, stored.moe_layers, where)
        placed = {}
        for name, values in part._asdict().items():
            start, into = (first * k, flat[name]) if name in flat else (first, columns[name])
            if values is not None and start + len(values) <= len(into):
                into[start : start + len(values)] = values
                values = into[start : start + len(values)]
            placed[name] = values
        return Rows(**placed)

    parts = list(pool.map(decode, range(len(rows) - 1)))
    for name, into in flat.items():
        pieces = [getattr(part, name) for part in parts]
        if name == "experts" or "weights" in wanted:
            full = sum(map(len, pieces)) == len(into)
            columns[name] = into if full else np.concatenate(pieces)
    if not len(columns["experts"]):
        raise TraceError("the trace is empty: it holds no pick")

    def ascend(group: int) -> None:
        first = max(rows[group] - 1, 0)  # with the last row before the group
        part = slice(first, rows[group + 1])
        request, token, kind = (columns[name][part] for name in ("request", "token", "phase"))
        check_order(request, token, kind, columns["layer"][part], first)

    for _ in pool.map(ascend, range(len(rows) - 1)):
        pass
    return columns


def group_starts(metadata: Any, size: int) -> list[int]:
    """First row of every row group, and the total; refused where a file cannot have so many."""
    rows = [0]
    for index in range(metadata.num_row_groups):
        rows.append(rows[-1] + metadata.row_group(index).num_rows)
    if sorted(rows) != rows or rows[-1] != metadata.num_rows or rows[-1] > _MOST_PER_BYTE * size:
        raise TraceError("the file is damaged: its footer announces an impossible number of rows")
    return rows
