"""Parquet files in the making: encoded and hashed piece by piece, named when complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from simlab.errors import TraceError
from simlab.trace.arrow import BATCH_ROWS, Rows, schema, to_batch
from simlab.trace.hash import ContentHash, seal_of
from simlab.trace.schema import METADATA_KEY, TraceMeta
from simlab.whole_file import check_place


class Sink:
    """A Parquet file being written in pieces of BATCH_ROWS rows, hashed on the way."""

    def __init__(self, path: Path, *, weights: bool, step: bool) -> None:
        self.hash = ContentHash(weights=weights, step=step)
        self.file = pq.ParquetWriter(
            path,
            schema(weights=weights, step=step),
            compression="zstd",
            compression_level=3,
            write_page_checksum=True,
            write_statistics=["request"],
            store_schema=False,
        )

    def write(self, rows: Rows) -> None:
        """Add checked rows, at most BATCH_ROWS of them."""
        self.hash.update(rows._asdict())
        self.file.write_batch(to_batch(rows), row_group_size=BATCH_ROWS)

    def finish(self, meta: TraceMeta) -> TraceMeta:
        """Add the metadata, with the content hash, and close the file."""
        meta = meta.with_(content_hash=self.hash.hexdigest())
        self.file.add_key_value_metadata({METADATA_KEY: meta.to_json().encode()})
        self.file.close()
        return meta


def _seal(path: Path) -> None:
    """Put the seal before the footer, and everything on the disk."""
    with open(path, "rb+") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little") + 8
        start = file.seek(-length, os.SEEK_END)
        footer = file.read()
        file.seek(start)
        file.write(seal_of(footer) + footer)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def parquet_sink(path: Path, *, weights: bool, step: bool) -> Iterator[Sink]:
    """A sink that becomes ``path`` when the block ends well, and otherwise leaves nothing."""
    check_place(path)
    made = path.with_name(f".{path.name[:80]}.{secrets.token_hex(6)}.tmp")
    sink = None
    try:
        sink = Sink(made, weights=weights, step=step)
        yield sink
        sink.file.close()
        _seal(made)
        os.replace(made, path)
    except (OSError, pa.ArrowException) as exc:
        raise TraceError(f"cannot write {path}: {reason_of(exc)}") from None
    finally:
        with suppress(OSError, pa.ArrowException):
            if sink is not None:
                sink.file.close()
            made.unlink()


def reason_of(exc: BaseException) -> str:
    """An exception's text on one line."""
    text = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
    return " ".join(text.split())
