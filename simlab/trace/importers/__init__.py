"""Importers: one file a source, each with ``load(path, options) -> Trace``.

A new source is a new module here and a line in IMPORTERS; a module is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from simlab.trace.importers.options import ImportOptions
from simlab.trace.schema import Trace

#: Name for ``--from`` -> module.
IMPORTERS = {
    "parquet": "simlab.trace.importers.parquet",
    "bmoe": "simlab.trace.importers.bmoe",
}


def import_trace(source: str, path: Path, options: ImportOptions) -> Trace:
    """Read another program's picks as a Trace, sorted; `write_trace` checks it.

    Raises:
        UsageError: something that the file does not say was not given.
        TraceError: the file is not of that source or is damaged.
    """
    load: Callable[[Path, ImportOptions], Trace] = import_module(IMPORTERS[source]).load
    return load(path, options)
