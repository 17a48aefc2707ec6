"""BigMoeOnEdge route traces: CSV with header lines, one row a pick."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv

from simlab.errors import TraceError
from simlab.trace.arrow import Rows, to_numpy
from simlab.trace.importers.options import ImportOptions, finish
from simlab.trace.read import reading
from simlab.trace.schema import Trace, TraceMeta

_TITLE = "# route_trace v1"
_COLUMNS = {
    "turn": pa.int32(),
    "phase": pa.uint8(),
    "step": pa.int32(),
    "layer": pa.int16(),
    "slot": pa.uint16(),
    "expert": pa.uint16(),
    "weight": pa.float32(),
    "residency": pa.uint8(),
    "expert_bytes": pa.int64(),
}


class RecordedFlags(NamedTuple):
    """What that engine's own cache did, one entry a pick in file order.

    ``residency`` is 1 where the expert was resident when its batch (one layer of one step; the
    whole prompt is one step) began. All int64 [P].
    """

    request: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    layer: npt.NDArray[np.int64]
    expert: npt.NDArray[np.int64]
    residency: npt.NDArray[np.int64]


def load(path: Path, options: ImportOptions) -> Trace:
    """Read a route trace: a turn is a request, ``step`` the token's position, weights are kept."""
    with reading(path):
        header = _header(path)
        picks = _picks(path, header)
        order = np.lexsort((picks["slot"], picks["layer"], picks["step"], picks["turn"]))
        picks = {name: column[order] for name, column in picks.items()}
        new = np.ones(len(order), dtype=np.bool_)
        new[1:] = False
        for name in ("turn", "step", "layer"):
            new[1:] |= picks[name][1:] != picks[name][:-1]
        starts = np.flatnonzero(new)
        lengths = np.diff(np.append(starts, len(order)))
        rank = np.arange(len(order)) - np.repeat(starts, lengths)
        if (rank != picks["slot"]).any():
            at = int((rank != picks["slot"]).argmax())
            raise TraceError(
                f"the picks of turn {picks['turn'][at]}, step {picks['step'][at]}, layer"
                f" {picks['layer'][at]} are not slots 0, 1, 2...: rows are missing or doubled"
            )
        rows = Rows(
            request=picks["turn"][starts],
            token=picks["step"][starts],
            phase=picks["phase"][starts],
            layer=picks["layer"][starts],
            lengths=lengths.astype(np.uint16),
            experts=picks["expert"],
            weights=picks["weight"].astype(np.float16),
            step=None,
        )
        return finish(rows, _meta(header, rows), options, path.name)


def read_recorded_flags(path: Path) -> RecordedFlags:
    """The hits and misses that the engine recorded while it made the trace."""
    with reading(path):
        picks = _picks(path, _header(path))
        names = ("turn", "step", "layer", "expert", "residency")
        return RecordedFlags(*(picks[name].astype(np.int64) for name in names))


class _Header(NamedTuple):
    lines: int
    values: dict[str, str]
    expert_bytes: dict[int, int]


def _header(path: Path) -> _Header:
    """The lines that begin with ``#``: model and shape, then the bytes of each layer's experts."""
    lines, values, sizes = 0, {}, {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.startswith("#"):
                break
            if not lines and line.strip() != _TITLE:
                break
            lines += 1
            words = dict(re.findall(r"(\w+)=(\S+)", line))
            if "layer" in words and "expert_bytes" in words:
                sizes[int(words["layer"])] = int(words["expert_bytes"])
            else:
                values.update(words)
    if not lines:
        raise TraceError(f"it is not a BigMoeOnEdge route trace (its first line is not {_TITLE!r})")
    missing = [name for name in ("n_expert", "n_expert_used") if not values.get(name, "").isdigit()]
    if missing:
        raise TraceError(f"its header does not say {missing[0]}")
    return _Header(lines, values, sizes)


def _picks(path: Path, header: _Header) -> dict[str, npt.NDArray[Any]]:
    table = csv.read_csv(
        path,
        read_options=csv.ReadOptions(skip_rows=header.lines),
        convert_options=csv.ConvertOptions(
            column_types=_COLUMNS, include_columns=list(_COLUMNS), null_values=[]
        ),
    )
    picks = {name: to_numpy(table.column(name)) for name in _COLUMNS}
    if not table.num_rows:
        raise TraceError("the trace is empty: it holds no pick")
    for name in ("turn", "step", "layer"):
        if picks[name].min() < 0:
            raise TraceError(f"{name} is negative in data row {int((picks[name] < 0).argmax())}")
    for name in ("phase", "residency"):
        if picks[name].max() > 1:
            raise TraceError(f"{name} is not 0 or 1 in data row {int((picks[name] > 1).argmax())}")
    return picks


def _meta(header: _Header, rows: Rows) -> TraceMeta:
    from simlab.trace.validate import layers_seen

    layers = layers_seen(rows.layer)
    known = all(layer in header.expert_bytes for layer in layers)
    return TraceMeta(
        n_expert=int(header.values["n_expert"]),
        k=int(header.values["n_expert_used"]),
        moe_layers=layers,
        model=PurePosixPath(header.values.get("model", "unknown")).name.removesuffix(".gguf"),
        expert_bytes=tuple((header.expert_bytes[layer],) for layer in layers) if known else (),
    )
