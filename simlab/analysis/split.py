"""A trace in two parts: one to tune on, and one, never looked at while tuning, to report on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simlab.errors import UsageError
from simlab.trace.edit import slice_trace
from simlab.trace.hash import content_hash
from simlab.trace.schema import Trace

SPLITS = ("first-half", "random", "tokens")
#: Fewer tokens in a part say nothing.
FEWEST_TOKENS = 32


@dataclass(frozen=True)
class Split:
    """The two parts, and in words which requests or tokens each holds."""

    tuning: Trace
    held_out: Trace
    tuned_on: str
    reported_on: str


def split_trace(trace: Trace, how: str = "first-half", seed: int = 0) -> Split:
    """Cut a trace in two.

    Args:
        how: ``first-half``: the first half of the requests is tuned on; ``random``: half of them,
            drawn with ``seed``; ``tokens``: the first half of each request's tokens. A single
            request is always cut by tokens.

    Raises:
        UsageError: there is no such way, or a part would be too small to say anything.
    """
    if how not in SPLITS:
        raise UsageError(f"--split must be one of {', '.join(SPLITS)}, not {how!r}")
    ids = np.unique(trace.request)
    n = len(ids)
    if how == "tokens" or n == 1:
        tuning, held_out = _by_tokens(trace)
        what = "the single request's" if n == 1 else "each request's"
        texts = [f"the first half of {what} tokens", f"the second half of {what} tokens"]
    else:
        first = ids[: n // 2]
        if how == "random":
            first = np.sort(np.random.default_rng(seed & (2**64 - 1)).permutation(ids)[: n // 2])
        chosen = np.isin(ids, first)
        tuning = slice_trace(trace, requests=ids[chosen].tolist())
        held_out = slice_trace(trace, requests=ids[~chosen].tolist())
        drawn = f"drawn with seed {seed}" if how == "random" else "the first in trace order"
        texts = [f"{len(first)} of {n} requests ({drawn})", f"the other {n - len(first)}"]
    for part in (tuning, held_out):
        tokens = _tokens(part)
        if tokens < FEWEST_TOKENS:
            raise UsageError(
                f"too few requests to tune on: a half holds {tokens} tokens, and {FEWEST_TOKENS}"
                " are the least; take a longer trace"
            )
    named = [
        replace(p, meta=p.meta.with_(content_hash=content_hash(p))) for p in (tuning, held_out)
    ]
    return Split(named[0], named[1], *texts)


def _tokens(trace: Trace) -> int:
    return len(np.unique(trace.request.astype(np.int64) << 32 | trace.token))


def _by_tokens(trace: Trace) -> tuple[Trace, Trace]:
    """The first and the second half of each request's tokens."""
    first = np.zeros(trace.n_rows, np.bool_)
    for request in np.unique(trace.request):
        rows = np.flatnonzero(trace.request == request)
        tokens = np.unique(trace.token[rows])
        first[rows] = trace.token[rows] < tokens[len(tokens) // 2]
    if first.all() or not first.any():
        raise UsageError("too few tokens to tune on: a half would be empty; take a longer trace")
    return _take(trace, first, "first"), _take(trace, ~first, "second")


def _take(trace: Trace, rows: npt.NDArray[np.bool_], which: str) -> Trace:
    lengths = np.diff(trace.offsets)
    picks = np.repeat(rows, lengths)
    note = f"the {which} half of each request's tokens"
    return Trace(
        meta=trace.meta.with_(notes=(*trace.meta.notes, note), content_hash=""),
        request=trace.request[rows],
        token=trace.token[rows],
        phase=trace.phase[rows],
        layer=trace.layer[rows],
        offsets=np.concatenate(([0], np.cumsum(lengths[rows]))).astype(np.int64),
        experts=trace.experts[picks],
        weights=None if trace.weights is None else trace.weights[picks],
        step=None if trace.step is None else trace.step[rows],
    )
