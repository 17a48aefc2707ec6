"""Traces for the tests of trace files: random ragged ones, and regular ones of any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from simlab.trace.schema import Trace, TraceMeta

ARRAYS = ("request", "token", "phase", "layer", "offsets", "experts", "weights", "step")

# One row of a crafted trace: request, token, phase, layer, experts.
Row = tuple[int, int, int, int, list[int]]


def make(rows: list[Row], n_expert: int = 8, **meta: Any) -> Trace:
    """Rows as a Trace, in the order given."""
    lengths = [len(row[4]) for row in rows]
    layers = tuple(sorted({row[3] for row in rows}))
    return Trace(
        meta=TraceMeta(
            **{"n_expert": n_expert, "k": max(1, *lengths), "moe_layers": layers, **meta}
        ),
        request=np.array([row[0] for row in rows], np.int32),
        token=np.array([row[1] for row in rows], np.int32),
        phase=np.array([row[2] for row in rows], np.uint8),
        layer=np.array([row[3] for row in rows], np.int16),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        experts=np.array([e for row in rows for e in row[4]], np.uint16),
    )


def regular(requests: int = 3, tokens: int = 20, layers: int = 4, n_expert: int = 16, k: int = 4,
            seed: int = 0, **meta: Any) -> Trace:  # fmt: skip
    """Every row there, k picks each; the first quarter of each request's tokens is prefill."""
    rng = np.random.default_rng(seed)
    rows = requests * tokens * layers
    token = np.tile(np.repeat(np.arange(tokens, dtype=np.int32), layers), requests)
    return Trace(
        meta=TraceMeta(
            **{"n_expert": n_expert, "k": k, "moe_layers": tuple(range(layers)), **meta}
        ),
        request=np.repeat(np.arange(requests, dtype=np.int32), tokens * layers),
        token=token,
        phase=(token >= tokens // 4).astype(np.uint8),
        layer=np.tile(np.arange(layers, dtype=np.int16), requests * tokens),
        offsets=np.arange(rows + 1, dtype=np.int64) * k,
        experts=rng.permuted(
            np.tile(np.arange(n_expert, dtype=np.uint16), (rows, 1)), axis=1
        )[:, :k].reshape(-1),
    )  # fmt: skip


def rows_of(trace: Trace) -> list[Row]:
    """A Trace as plain rows."""
    bounds = trace.offsets.tolist()
    experts = trace.experts.tolist()
    columns = (trace.request, trace.token, trace.phase, trace.layer)
    heads = zip(*(column.tolist() for column in columns), strict=True)
    return [(*head, experts[bounds[i] : bounds[i + 1]]) for i, head in enumerate(heads)]


def random_trace(rnd: Random) -> Trace:
    """Ragged rows (empty ones too), absent rows, gaps in all numbers, optional columns."""
    n_expert = rnd.choice([1, 2, 5, 9, 70, 300, 65536])
    k = rnd.randint(1, min(n_expert, rnd.choice([1, 4, 30])))
    layers = sorted(rnd.sample(range(rnd.choice([6, 32768])), rnd.randint(1, 5)))
    constant = rnd.random() < 0.3
    rows: list[Row] = []
    for request in sorted(rnd.sample(range(rnd.choice([9, 2**31])), rnd.randint(1, 4))):
        for token in sorted(rnd.sample(range(rnd.choice([9, 2**31])), rnd.randint(1, 6))):
            phase = rnd.randint(0, 1)
            for layer in layers:
                if rnd.random() < 0.8:
                    length = k if constant else rnd.randint(0, k)
                    rows.append((request, token, phase, layer, rnd.sample(range(n_expert), length)))
    if not any(row[4] for row in rows):
        rows = [(0, 0, 1, layers[0], [n_expert - 1])]
    trace = make(
        rows, n_expert, k=k, moe_layers=tuple(layers), model="m\u00fcsli \u2713",
        expert_bytes=tuple((7 + n, 9) for n in range(len(layers))) if rnd.random() < 0.5 else (),
        kind=rnd.choice(["captured", "synthetic"]), seed=rnd.choice([None, 3]),
        tags={str(rows[0][0]): "code"}, notes=("a", "b"),
    )  # fmt: skip
    bits = np.random.default_rng(rnd.randrange(2**32))
    if rnd.random() < 0.5:  # any bit pattern is kept, not-a-numbers too
        weights = bits.integers(0, 2**16, trace.n_picks, dtype=np.uint16).view(np.float16)
        trace = replace(trace, weights=weights)
    if rnd.random() < 0.5:
        trace = replace(trace, step=bits.integers(0, 2**31, trace.n_rows, dtype=np.int32))
    return trace


def random_traces() -> st.SearchStrategy[Trace]:
    """The same for hypothesis."""
    return st.randoms(use_true_random=False).map(random_trace)


def assert_same(found: Trace, wanted: Trace) -> None:
    """Equal to the bit, in equal types."""
    for name in ARRAYS:
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert mine.dtype == theirs.dtype, name
            assert mine.tobytes() == theirs.tobytes(), name


def temporaries(folder: Path) -> list[str]:
    """Names of hidden leftovers."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]
