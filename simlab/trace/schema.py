"""What a trace is: router picks as flat arrays, and what is known about where they came from.

On disk a trace is a Parquet file with one row a (token, layer); in memory it is the same rows as
numpy arrays, the lists of experts flattened behind row offsets. Rows may be absent and the number
of picks may vary from row to row, so there is no dense [tokens, layers, k] array anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.errors import TraceError

FORMAT_VERSION = 1
METADATA_KEY = b"simlab"

PREFILL = 0
DECODE = 1

#: Kinds of origin. A synthetic trace is labelled wherever its figures appear.
KINDS = ("captured", "imported", "synthetic")


@dataclass(frozen=True)
class TraceMeta:
    """Provenance and model shape of a trace; stored as JSON under the Parquet key ``simlab``.

    ``expert_bytes`` holds, for each layer of ``moe_layers``, the bytes of one expert per tensor
    (gate, up, down: two or three numbers) or a single number when only the sum is known; an empty
    tuple when the bytes are unknown.
    """

    n_expert: int
    k: int
    moe_layers: tuple[int, ...]
    model: str = "unknown"
    expert_bytes: tuple[tuple[int, ...], ...] = ()
    kind: str = "imported"
    source: str = ""
    device: str = ""
    command: str = ""
    seed: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    partial: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    content_hash: str = ""
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The metadata as the JSON text stored in the file."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> TraceMeta:
        """Parse and check stored metadata; unknown keys are ignored.

        Raises:
            TraceError: the JSON is damaged, of a newer format, or lacks the model's shape.
        """
        try:
            raw = json.loads(text)
            if not isinstance(raw, dict):
                raise ValueError("not a JSON object")
            if int(raw.get("format_version", 0)) > FORMAT_VERSION:
                raise TraceError(
                    f"trace format {raw['format_version']} is newer than this simlab reads"
                    f" ({FORMAT_VERSION}); update simlab"
                )
            known: dict[str, Any] = {
                f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None
            }
            known["n_expert"] = int(known["n_expert"])
            known["k"] = int(known["k"])
            known["moe_layers"] = tuple(int(x) for x in known["moe_layers"])
            known["expert_bytes"] = tuple(
                tuple(int(b) for b in row) for row in known.get("expert_bytes", ())
            )
            known["notes"] = tuple(str(n) for n in known.get("notes", ()))
            known["tags"] = {str(a): str(b) for a, b in known.get("tags", {}).items()}
            known["versions"] = {str(a): str(b) for a, b in known.get("versions", {}).items()}
            for name in ("model", "kind", "source", "device", "command", "content_hash"):
                known[name] = str(known.get(name, ""))
            meta = cls(**known)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as exc:
            raise TraceError(f"the trace's simlab metadata is damaged ({exc})") from None
        meta.check()
        return meta

    def check(self) -> None:
        """Raise TraceError unless the stated shape is possible."""
        if not 1 <= self.n_expert <= 65536:
            raise TraceError(f"n_expert must be 1..65536, not {self.n_expert}")
        if not 1 <= self.k <= self.n_expert:
            raise TraceError(f"k must be 1..n_expert ({self.n_expert}), not {self.k}")
        if not self.moe_layers or list(self.moe_layers) != sorted(set(self.moe_layers)):
            raise TraceError("moe_layers must be a non-empty ascending list of layer numbers")
        if self.moe_layers[0] < 0 or self.moe_layers[-1] > 32767:
            raise TraceError("layer numbers must be 0..32767")
        if self.expert_bytes and len(self.expert_bytes) != len(self.moe_layers):
            raise TraceError(
                f"expert_bytes names {len(self.expert_bytes)} layers, the trace has"
                f" {len(self.moe_layers)} MoE layers"
            )
        if any(not row or min(row) <= 0 for row in self.expert_bytes):
            raise TraceError("expert_bytes must be positive for every layer")
        if self.kind not in KINDS:
            raise TraceError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")

    def with_(self, **changes: Any) -> TraceMeta:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Trace:
    """Router picks in memory. R rows, P picks; rows sorted by (request, token, layer).

    Attributes:
        meta: provenance and model shape.
        request: int32 [R], request of the row.
        token: int32 [R], position of the token in its request.
        phase: uint8 [R], 0 prefill, 1 decode.
        layer: int16 [R], the model's layer number.
        offsets: int64 [R + 1]; the picks of row r are ``experts[offsets[r]:offsets[r + 1]]``.
        experts: uint16 [P], in router order.
        weights: float16 [P] or None.
        step: int32 [R] or None; the recorded forward pass of the row.
    """

    meta: TraceMeta
    request: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]
    phase: npt.NDArray[np.uint8]
    layer: npt.NDArray[np.int16]
    offsets: npt.NDArray[np.int64]
    experts: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float16] | None = None
    step: npt.NDArray[np.int32] | None = None

    @property
    def n_rows(self) -> int:
        """Number of (token, layer) rows."""
        return len(self.request)

    @property
    def n_picks(self) -> int:
        """Number of picks over all rows."""
        return len(self.experts)

    @property
    def n_keys(self) -> int:
        """(layer, expert) pairs of the model: MoE layers x experts."""
        return len(self.meta.moe_layers) * self.meta.n_expert

    def to_polars(self) -> Any:
        """The rows as a polars DataFrame (experts as a list column)."""
        import polars as pl

        from simlab.trace.arrow import to_arrow

        return pl.from_arrow(to_arrow(self))

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame (experts as arrays)."""
        from simlab.trace.arrow import to_arrow

        return to_arrow(self).to_pandas()
