"""Result files: rows as a JSON list, or as a Parquet table with one row a cell.

Both hold what ``Result.to_dict`` gives. In Parquet the plain values are columns of their own, slots
and notes are lists, and the nested parts are JSON text, so any reader can filter by plain columns.
A file appears under its name only when it is complete.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from simlab.errors import SimlabError, UsageError
from simlab.result.schema import SCHEMA_VERSION, Counters, Result
from simlab.whole_file import check_place, write_atomically

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

SUFFIXES = (".json", ".parquet")

_SCALARS = (str, int, float, bool)
_LISTS = {"slots_json": int, "notes": str}
_JSON_TEXT = (
    "params_json", "cycle", "by_class", "by_phase", "by_layer", "by_request", "windows",
    "provenance", "timing",
)  # fmt: skip


def _plain_columns() -> dict[str, tuple[type, bool]]:
    """Name -> (type, may be None) of the plain values of a row, read off the schema."""
    columns: dict[str, tuple[type, bool]] = {}
    for owner in (Result, Counters):
        for name, hint in get_type_hints(owner).items():
            options = set(get_args(hint)) if isinstance(hint, UnionType) else {hint}
            kinds = [kind for kind in _SCALARS if kind in options]
            if len(kinds) == 1 and options <= {kinds[0], NoneType}:
                columns[name] = (kinds[0], NoneType in options)
    return columns


_PLAIN = _plain_columns()


def write_results(results: Iterable[Result], path: str | os.PathLike[str]) -> None:
    """Write rows to ``path``, ``.json`` or ``.parquet`` by its suffix; all of it or nothing.

    Raises:
        UsageError: another suffix, or the folder does not exist.
        SimlabError: the file cannot be written (full disk, no permission).
    """
    path = Path(path)
    if _suffix(path) == ".json":
        lines = (json.dumps(result.to_dict(), allow_nan=False) for result in results)
        body = ("[\n" + ",\n".join(lines) + "\n]\n").encode()
    else:
        import pyarrow.parquet as pq

        sink = io.BytesIO()
        table = _to_arrow(results, nested=True)
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        body = sink.getvalue()
    write_atomically(path, body)


def read_results(path: str | os.PathLike[str]) -> list[Result]:
    """The rows of a result file, in file order.

    Raises:
        UsageError: no such file, or its suffix is not one of SUFFIXES.
        SimlabError: the file is damaged or holds something else.
    """
    path = Path(path)
    suffix = _suffix(path)
    if not path.is_file():  # opening a pipe would wait for ever
        raise UsageError(f"no result file {path}; write one with simlab replay --out {path.name}")
    try:
        rows = _rows_of_json(path) if suffix == ".json" else _rows_of_parquet(path)
    except Exception as exc:  # whatever the parsers make of damaged bytes
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise SimlabError(f"cannot read results from {path}: {reason}; write it again") from None
    results = []
    for number, row in enumerate(rows, 1):
        try:
            _check_types(row)
            results.append(Result.from_dict(row))
        except SimlabError as exc:
            reason = " ".join(str(exc).split())[:300]
            raise SimlabError(f"{path}, row {number}: {reason}") from None
    return results


def results_to_polars(results: Iterable[Result]) -> pl.DataFrame:
    """A flat table, one row a cell: all plain values, slots and notes as lists, params as JSON."""
    import polars as pl

    frame = pl.from_arrow(_to_arrow(results, nested=False))
    assert isinstance(frame, pl.DataFrame)
    return frame


def results_to_pandas(results: Iterable[Result]) -> pd.DataFrame:
    """The table of ``results_to_polars`` as a pandas DataFrame."""
    frame: pd.DataFrame = _to_arrow(results, nested=False).to_pandas()
    return frame


def check_target(path: str | os.PathLike[str]) -> None:
    """Refuse a place that write_results would refuse, before hours are spent on the results.

    Raises:
        UsageError: another suffix, the folder does not exist, or ``path`` is a folder.
    """
    _suffix(Path(path))
    check_place(Path(path))


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"{path}: result files end in {' or '.join(SUFFIXES)}")
    return suffix


def _rows_of_json(path: Path) -> list[Any]:
    rows = json.loads(path.read_bytes())
    if not isinstance(rows, list):
        raise SimlabError("not a list of result rows")
    return rows


def _rows_of_parquet(path: Path) -> list[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if "policy" not in file.schema_arrow.names:
            raise SimlabError("not a simlab result file (it has no column 'policy')")
        rows: list[Any] = file.read().to_pylist()
    for row in rows:
        row.update({name: json.loads(row[name]) for name in _JSON_TEXT if name in row})
    return rows


def _to_arrow(results: Iterable[Result], nested: bool) -> pa.Table:
    """Rows as an Arrow table: plain columns typed by the schema; JSON text for nested parts."""
    import pyarrow as pa

    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    rows = [result.to_dict() for result in results]
    columns: list[Any] = []
    names: list[str] = []
    for name in _row_names():
        values = [row[name] for row in rows]
        if name in _PLAIN:
            columns.append(pa.array(values, types[_PLAIN[name][0]]))
        elif name in _LISTS:
            columns.append(pa.array(values, pa.list_(types[_LISTS[name]])))
        elif nested or name == "params_json":
            texts = [json.dumps(value, allow_nan=False) for value in values]
            columns.append(pa.array(texts, pa.string()))
        else:
            continue
        names.append(name)
    table = pa.table(columns, names=names)
    about = {"what": "results", "schema_version": SCHEMA_VERSION}
    return table.replace_schema_metadata({"simlab": json.dumps(about)})


def _row_names() -> list[str]:
    """The keys of ``Result.to_dict``, in its order."""
    renamed = {"params": "params_json", "slots": "slots_json"}
    names: list[str] = []
    for name in get_type_hints(Result):
        if name == "counters":
            names += get_type_hints(Counters)
        else:
            names.append(renamed.get(name, name))
    return names


def _check_types(row: Any) -> None:
    """Raise SimlabError unless every value of a row has the type that the schema states."""
    if not isinstance(row, Mapping):
        raise SimlabError("not an object")
    for name, (kind, optional) in _PLAIN.items():
        value = row.get(name)
        if name in row and not (value is None and optional) and not _is(value, kind):
            raise SimlabError(f"{name} must be of type {kind.__name__}, not {value!r}")
    for name, kind in _LISTS.items():
        values = row.get(name, [])
        if not isinstance(values, list) or not all(_is(value, kind) for value in values):
            raise SimlabError(f"{name} must be a list of {kind.__name__}")
    for name in ("params_json", "cycle"):
        _check_numbers(name, [row.get(name, {})])
    for name in ("by_class", "by_phase"):
        parts = row.get(name, {})
        if not isinstance(parts, Mapping):
            raise SimlabError(f"{name} must be an object")
        _check_numbers(name, list(parts.values()))
    for name in ("by_layer", "by_request", "windows"):
        _check_numbers(name, row.get(name, []))
    if any(not {"layer", "lookups", "hits"} <= set(part) for part in row.get("by_layer", [])):
        raise SimlabError("by_layer must name layer, lookups and hits")
    for name in ("provenance", "timing"):
        if not isinstance(row.get(name, {}), Mapping):
            raise SimlabError(f"{name} must be an object")
    if "slots_json" in row and (not row["slots_json"] or row.get("n_keys", 1) < 1):
        raise SimlabError("a cell needs the slots of at least one group and at least one key")


def _check_numbers(name: str, parts: Sequence[Any]) -> None:
    if not isinstance(parts, list):
        raise SimlabError(f"{name} must be a list")
    for part in parts:
        if not isinstance(part, Mapping) or not all(
            value is None or _is(value, float) for value in part.values()
        ):
            raise SimlabError(f"{name} must hold numbers")


def _is(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a plain type; whole numbers fit int64, floats are finite."""
    if kind is float and isinstance(value, float):
        return math.isfinite(value)
    if kind in (int, float):
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, kind)
