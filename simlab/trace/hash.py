"""The content hash, identity of the picks whatever file holds them, and the seal of a footer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.trace.schema import Trace

#: Columns in the order of the final digest, with their canonical little-endian form. ``lengths``
#: is the number of picks of each row.
CANONICAL = {
    "request": "<i4",
    "token": "<i4",
    "phase": "<u1",
    "layer": "<i2",
    "lengths": "<u2",
    "experts": "<u2",
    "weights": "<f2",
    "step": "<i4",
}

#: Column name -> array, None for an optional column that the trace lacks.
Columns = dict[str, npt.NDArray[Any] | None]


def _canonical(name: str, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(column, dtype=CANONICAL[name])


def _combine(digests: Iterable[tuple[str, str]]) -> str:
    text = "".join(f"{name}:{digest}\n" for name, digest in digests)
    return hashlib.sha256(text.encode()).hexdigest()


class ContentHash:
    """The content hash of a trace that arrives in pieces, in order."""

    def __init__(self, *, weights: bool = False, step: bool = False) -> None:
        self._columns = {
            name: hashlib.sha256()
            for name in CANONICAL
            if (name != "weights" or weights) and (name != "step" or step)
        }

    def update(self, columns: Columns) -> None:
        """Take the next rows; every column of the trace must be there."""
        for name, digest in self._columns.items():
            column = columns[name]
            if column is None:
                raise ValueError(f"column {name} is missing")
            digest.update(_canonical(name, column).data)

    def hexdigest(self) -> str:
        """The hash of the rows so far, 64 hexadecimal digits."""
        return _combine((name, digest.hexdigest()) for name, digest in self._columns.items())


def hash_columns(columns: Columns, pool: Executor | None = None) -> str:
    """The content hash of whole columns; with a pool the columns are hashed side by side."""

    def one(name: str) -> tuple[str, str]:
        column = columns[name]
        assert column is not None
        return name, hashlib.sha256(_canonical(name, column).data).hexdigest()

    names = [name for name in CANONICAL if columns.get(name) is not None]
    run: Callable[..., Iterable[tuple[str, str]]] = map if pool is None else pool.map
    # the longest column first, so that threads end together; the digest keeps CANONICAL's order
    found = dict(run(one, sorted(names, key=lambda n: -columns[n].nbytes)))  # type: ignore[union-attr]
    return _combine((name, found[name]) for name in names)


#: Begins the seal: bytes before the footer of our files, where other Parquet readers do not look.
SEAL_MARK = b"simlab: sha256 of the footer:"
SEAL_SIZE = len(SEAL_MARK) + 32


def seal_of(footer: bytes) -> bytes:
    """The seal, SEAL_SIZE bytes, of a Parquet footer (from its first byte to the end of the file).

    A footer has no checksum of its own, and the Parquet library may not survive a damaged one.
    """
    return SEAL_MARK + hashlib.sha256(footer).digest()


def columns_of(trace: Trace) -> Columns:
    """The columns of a trace under their hash names (``lengths`` derived from ``offsets``)."""
    return {
        "request": trace.request,
        "token": trace.token,
        "phase": trace.phase,
        "layer": trace.layer,
        "lengths": np.diff(trace.offsets).astype(np.uint16),
        "experts": trace.experts,
        "weights": trace.weights,
        "step": trace.step,
    }


def content_hash(trace: Trace) -> str:
    """The content hash of a trace in memory; its metadata plays no part."""
    return hash_columns(columns_of(trace))
