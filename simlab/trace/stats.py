"""What is in a trace: sizes, reuse from token to token, popular experts, and signs of bad data."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.trace.schema import DECODE, Trace

#: Distances in tokens at which the overlap of picks is measured.
LAGS = (1, 8, 32)
#: Shares of a layer's experts whose coverage is measured; 0.164 is the "top 21 of 128".
SHARES = (0.1, 0.164, 0.25, 0.5)
#: Tokens that make the head of a request.
HEAD_TOKENS = 16

_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Overlap:
    """Reuse at one distance.

    Attributes:
        lag: distance in tokens, within a request and a layer.
        share: share of the picks of a row that the row ``lag`` tokens earlier holds too, over the
            rows that have such a row; None without any.
        uniform: what independent, equally likely experts would give.
        rows: rows compared.
    """

    lag: int
    share: float | None
    uniform: float | None
    rows: int


@dataclass(frozen=True)
class Coverage:
    """Share of all picks that fall on the ``experts`` most picked experts of their layer.

    ``share``: the most picked of the whole trace. ``within_request``: of each request by itself;
    texts differ in their favourites, so this is the higher figure.
    """

    experts: int
    share: float
    within_request: float


@dataclass(frozen=True)
class TraceStats:
    """Figures of a trace; see the fields' names and Overlap, Coverage.

    Attributes:
        missing_rows: (token, layer) places without a row.
        stickiness: overlap at lag 1.
        repeated_tokens: tokens whose picks equal the previous token's in all layers.
        zero_rows: rows that hold expert 0 and nothing else.
        full_rows: rows that hold every expert of the layer.
        copied_requests: requests whose picks all equal those of an earlier request.
        distinct_heads: distinct beginnings (HEAD_TOKENS tokens) among the requests.
    """

    requests: int
    tokens: int
    prefill_tokens: int
    decode_tokens: int
    rows: int
    missing_rows: int
    picks: int
    k_min: int
    k_max: int
    keys: int
    distinct_keys: int
    stickiness: Overlap
    overlaps: tuple[Overlap, ...]
    coverage: tuple[Coverage, ...]
    repeated_tokens: int
    zero_rows: int
    full_rows: int
    copied_requests: int
    distinct_heads: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def trace_stats(trace: Trace, *, threads: int = 2) -> TraceStats:
    """All figures of a trace, in one pass a layer; memory needed is about half of the trace's."""
    starts = token_starts(trace.request, trace.token)
    heads = np.flatnonzero(np.diff(trace.request[starts], prepend=-1))
    decode = int((trace.phase[starts] == DECODE).sum())
    lengths = np.diff(trace.offsets)
    order = np.argsort(trace.layer, kind="stable")
    bounds = np.searchsorted(trace.layer[order], trace.meta.moe_layers)
    rows_by_layer = np.split(order, bounds[1:])
    k = int(lengths[0]) if lengths.min() == lengths.max() else None
    with ThreadPoolExecutor(threads) as pool:
        layers = list(pool.map(lambda rows: _layer(trace, rows, k), rows_by_layer))
    counts = np.stack([layer.counts for layer in layers])
    pairs = np.sum([layer.pairs for layer in layers], axis=0)
    hashes = token_hashes(trace.layer, trace.offsets, trace.experts, starts)
    copies, distinct = _copies(hashes, heads)
    first = trace.experts[np.minimum(trace.offsets[:-1], trace.n_picks - 1)]
    overlaps = tuple(_overlap(lag, row) for lag, row in zip(LAGS, pairs, strict=True))
    return TraceStats(
        requests=len(heads),
        tokens=len(starts),
        prefill_tokens=len(starts) - decode,
        decode_tokens=decode,
        rows=trace.n_rows,
        missing_rows=len(starts) * len(trace.meta.moe_layers) - trace.n_rows,
        picks=trace.n_picks,
        k_min=int(lengths.min()),
        k_max=int(lengths.max()),
        keys=trace.n_keys,
        distinct_keys=int((counts > 0).sum()),
        stickiness=overlaps[0],
        overlaps=overlaps,
        coverage=_coverage(counts, np.sum([layer.favourites for layer in layers], axis=0)),
        repeated_tokens=int(_repeats(trace.request[starts], hashes).sum()),
        zero_rows=int(((lengths == 1) & (first == 0)).sum()),
        full_rows=int((lengths == trace.meta.n_expert).sum()),
        copied_requests=copies,
        distinct_heads=distinct,
    )


def token_starts(
    request: npt.NDArray[np.int32], token: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """The first row of every token, int64 [tokens]; rows sorted."""
    new = np.ones(len(request), dtype=np.bool_)
    new[1:] = (request[1:] != request[:-1]) | (token[1:] != token[:-1])
    return np.flatnonzero(new)


def tokens_repeat(
    request: npt.NDArray[np.int32],
    layer: npt.NDArray[np.int16],
    offsets: npt.NDArray[np.int64],
    experts: npt.NDArray[np.uint16],
    starts: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Whether a token's picks equal those of the request's previous token in all layers."""
    return _repeats(request[starts], token_hashes(layer, offsets, experts, starts))


def _repeats(
    request: npt.NDArray[np.int32], hashes: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    repeat = np.zeros(len(hashes), dtype=np.bool_)
    repeat[1:] = (hashes[1:] == hashes[:-1]) & (request[1:] == request[:-1])
    return repeat


def token_hashes(
    layer: npt.NDArray[np.int16],
    offsets: npt.NDArray[np.int64],
    experts: npt.NDArray[np.uint16],
    starts: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint64]:
    """64-bit hashes of tokens: of their layers and picks, in router order; uint64 [tokens]."""
    rows = np.empty(len(layer), dtype=np.uint64)
    for first in range(0, len(layer), _ROWS_AT_ONCE):
        bounds = offsets[first : first + _ROWS_AT_ONCE + 1]
        part = slice(first, first + len(bounds) - 1)
        rank = np.arange(bounds[0], bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
        mixed = _mix(experts[bounds[0] : bounds[-1]].astype(np.uint64) | _shift(rank + 1, 16))
        rows[part] = _mix(_sums(mixed, bounds - bounds[0]) ^ _shift(layer[part] + 1, 48))
    return _sums(rows, np.append(starts, len(layer)))


def _shift(values: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint64]:
    return values.astype(np.uint64) << np.uint64(bits)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finisher of SplitMix64 (Steele, Lea, Flood 2014): every bit depends on every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _sums(values: npt.NDArray[np.uint64], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Sums modulo 2^64 of the pieces ``values[bounds[i]:bounds[i + 1]]``; pieces may be empty."""
    running = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values, out=running[1:])
    return np.diff(running[bounds])


def _copies(hashes: npt.NDArray[np.uint64], heads: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Requests equal to an earlier one, and distinct beginnings; ``heads``: their first tokens."""
    sizes = np.diff(np.append(heads, len(hashes)))
    position = np.arange(len(hashes)) - np.repeat(heads, sizes)
    placed = _mix(hashes ^ _mix(position.astype(np.uint64) + np.uint64(1)))
    bounds = np.append(heads, len(hashes))
    whole = _sums(placed, bounds)
    placed[position >= HEAD_TOKENS] = 0
    return len(heads) - len(np.unique(whole)), len(np.unique(_sums(placed, bounds)))


class _Layer(NamedTuple):
    counts: npt.NDArray[np.int64]  # [n_expert], picks of each expert
    pairs: npt.NDArray[np.float64]  # [LAGS, 4], see _pairs
    favourites: npt.NDArray[np.int64]  # [n_expert], picks of each request's n + 1 favourites


def _layer(trace: Trace, rows: npt.NDArray[np.int64], k: int | None) -> _Layer:
    """One layer's figures; ``rows`` are its rows, ascending."""
    n_expert = trace.meta.n_expert
    lengths, picks = _picks_of(trace, rows, k)
    begin = np.cumsum(lengths) - lengths
    width = -(-n_expert // 64)
    sets = np.zeros(len(rows) * width, dtype=np.uint64)
    words = np.arange(len(rows)) * width
    for rank in range(int(lengths.max(initial=0))):
        has = slice(None) if rank < lengths.min() else np.flatnonzero(lengths > rank)
        expert = picks[begin[has] + rank]
        # a row's picks are distinct and ranks come one after the other: no bit is lost
        bit = np.uint64(1) << (expert & np.uint16(63)).astype(np.uint64)
        sets[words[has] + (expert >> 6)] |= bit
    by_row = sets.reshape(len(rows), width)
    request, token = trace.request[rows], trace.token[rows]
    pairs = [_pairs(request, token, lengths, by_row, lag, n_expert) for lag in LAGS]
    number = np.cumsum(np.diff(request, prepend=request[:1]) != 0)
    own = np.bincount(
        np.repeat(number * n_expert, lengths) + picks,
        minlength=(number.max(initial=0) + 1) * n_expert,
    ).reshape(-1, n_expert)
    favourites = (-np.sort(-own, axis=1)).sum(axis=0).cumsum()
    return _Layer(own.sum(axis=0), np.array(pairs), favourites)


def _picks_of(
    trace: Trace, rows: npt.NDArray[np.int64], k: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint16]]:
    """Lengths of some rows and their picks, one row after the other; ``k`` if all rows have k."""
    if k is not None:
        return np.full(len(rows), k), trace.experts.reshape(-1, k)[rows].reshape(-1)
    lengths = trace.offsets[rows + 1] - trace.offsets[rows]
    index = np.repeat(trace.offsets[rows] - (np.cumsum(lengths) - lengths), lengths)
    return lengths, trace.experts[index + np.arange(len(index))]


def _pairs(
    request: npt.NDArray[np.int32],
    token: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int64],
    sets: npt.NDArray[np.uint64],
    lag: int,
    n_expert: int,
) -> tuple[float, float, float, float]:
    """Over rows with a partner: their number, picks, shared picks, and those expected of chance."""
    place = request.astype(np.int64) << 32 | token
    back = np.maximum(np.arange(len(place)) - lag, 0)
    if ((np.diff(request) == 0) & (np.diff(token) != 1)).any():
        # tokens are missing: the partner is not simply ``lag`` rows back
        back = np.minimum(np.searchsorted(place, place - lag), len(place) - 1)
    now = np.flatnonzero((place[back] == place - lag) & (token >= lag))
    then = back[now]
    shared = np.bitwise_count(sets[now] & sets[then]).sum(dtype=np.int64)
    chance = (lengths[now] * lengths[then]).sum() / n_expert
    return len(now), float(lengths[now].sum()), float(shared), float(chance)


def _overlap(lag: int, pairs: npt.NDArray[np.float64]) -> Overlap:
    rows, picks, shared, chance = (float(x) for x in pairs)
    if not picks:
        return Overlap(lag, None, None, int(rows))
    return Overlap(lag, shared / picks, chance / picks, int(rows))


def _coverage(
    counts: npt.NDArray[np.int64], favourites: npt.NDArray[np.int64]
) -> tuple[Coverage, ...]:
    ordered = -np.sort(-counts, axis=1)
    n_expert = counts.shape[1]
    tops = sorted({max(1, round(share * n_expert)) for share in SHARES})
    picks = ordered.sum()
    return tuple(
        Coverage(n, float(ordered[:, :n].sum() / picks), float(favourites[n - 1] / picks))
        for n in tops
    )
