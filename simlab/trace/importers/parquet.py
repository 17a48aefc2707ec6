"""Parquet files with one row a token and layer: request, token, layer, experts (and more)."""

from __future__ import annotations

from pathlib import Path

from simlab.trace.arrow import COLUMNS, check_columns, rows_of
from simlab.trace.importers.options import ImportOptions, finish
from simlab.trace.read import group_starts, open_parquet, reading, stored_meta
from simlab.trace.schema import Trace


def load(path: Path, options: ImportOptions) -> Trace:
    """Read a file whose columns have the format's names; see read_trace for what is accepted.

    Rows may be in any order. What a trace of simlab says about itself is kept.
    """
    with reading(path):
        file = open_parquet(path)
        group_starts(file.metadata, path.stat().st_size)
        names = file.schema_arrow.names
        check_columns(names)
        meta = stored_meta(file.metadata.metadata)
        table = file.read(columns=[name for name in COLUMNS if name in names])
        return finish(rows_of(table), meta, options, path.name)
