"""What ``simlab inspect`` shows of a trace: its statistics, and the cycle T per concurrency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simlab.replay.access import cycle_of
from simlab.trace.schema import Trace, TraceMeta
from simlab.trace.stats import HEAD_TOKENS, Overlap, TraceStats, trace_stats

#: Streams decoding together for which the cycle is shown.
CONCURRENCIES = (1, 4, 16)


@dataclass(frozen=True)
class Inspection:
    """A trace's metadata, statistics, and (min, median, max) of the cycle T by concurrency."""

    meta: TraceMeta
    stats: TraceStats
    cycles: Mapping[int, tuple[int, int, int]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: metadata (tags counted only), statistics and cycles."""
        meta = self.meta
        return {
            "model": meta.model,
            "kind": meta.kind,
            "synthetic": meta.kind == "synthetic",
            "source": meta.source,
            "partial": meta.partial,
            "content_hash": meta.content_hash,
            "n_expert": meta.n_expert,
            "k": meta.k,
            "moe_layers": list(meta.moe_layers),
            "expert_bytes": [sum(row) for row in meta.expert_bytes],
            "notes": list(meta.notes),
            **self.stats.to_dict(),
            "cycle": [
                {"concurrency": c, "min": low, "median": middle, "max": high}
                for c, (low, middle, high) in self.cycles.items()
            ],
        }


def inspect_trace(trace: Trace, concurrencies: Sequence[int] = CONCURRENCIES) -> Inspection:
    """Statistics of a trace, and its cycle at each concurrency."""
    cycles = {c: cycle_of(trace, c) for c in concurrencies}
    return Inspection(trace.meta, trace_stats(trace), cycles)


#: A heading, and below it lines of (name, value).
Section = tuple[str, list[tuple[str, str]]]


def describe(found: Inspection) -> list[Section]:
    """An inspection in words, section by section."""
    return [
        ("Model", _model(found.meta)),
        ("Trace", _sizes(found)),
        ("Reuse", _reuse(found)),
        ("Cycle T (distinct keys touched by one step, all layers)", _cycles(found)),
        ("Signs of bad data", _signs(found)),
    ]


def _model(meta: TraceMeta) -> list[tuple[str, str]]:
    sizes = sorted({sum(row) for row in meta.expert_bytes})
    lines = [
        ("model", meta.model),
        ("origin", f"{meta.kind}{', PARTIAL (recovered)' if meta.partial else ''}"),
        ("source", meta.source or "not said"),
        ("shape", f"{len(meta.moe_layers)} MoE layers x {meta.n_expert} experts, k = {meta.k}"),
        ("bytes of an expert", " or ".join(f"{n:,}" for n in sizes) or "unknown"),
        ("content hash", meta.content_hash[:16]),
    ]
    return lines + [("note", note) for note in meta.notes]


def _sizes(found: Inspection) -> list[tuple[str, str]]:
    stats = found.stats
    k = f"{stats.k_min}" if stats.k_min == stats.k_max else f"{stats.k_min} to {stats.k_max}"
    missing = f" ({stats.missing_rows:,} layer rows missing)" if stats.missing_rows else ""
    return [
        ("requests", f"{stats.requests:,}"),
        ("tokens", f"{stats.prefill_tokens:,} prefill, {stats.decode_tokens:,} decode"),
        ("rows", f"{stats.rows:,}{missing}"),
        ("picks", f"{stats.picks:,}, {k} a row"),
        (
            "distinct keys",
            f"{stats.distinct_keys:,} of {stats.keys:,} ({stats.distinct_keys / stats.keys:.1%})",
        ),
    ]


def _percent(overlap: Overlap) -> str:
    if overlap.share is None or overlap.uniform is None:
        return "no two tokens that far apart"
    return f"{overlap.share:.1%} of picks (uniform routing: {overlap.uniform:.1%})"


def _reuse(found: Inspection) -> list[tuple[str, str]]:
    stats, n_expert = found.stats, found.meta.n_expert
    lines = [("stickiness", f"{_percent(stats.stickiness)} were the previous token's too")]
    lines += [
        (f"overlap at lag {o.lag}", _percent(o))
        for o in stats.overlaps
        if o is not stats.stickiness
    ]
    lines += [
        (
            f"hottest {c.experts} of {n_expert}",
            f"{c.share:.1%} of picks (each request's own: {c.within_request:.1%})",
        )
        for c in stats.coverage
    ]
    return lines


def _cycles(found: Inspection) -> list[tuple[str, str]]:
    return [
        (f"concurrency {c}", f"{low:,} / {middle:,} / {high:,} (min / median / max)")
        for c, (low, middle, high) in found.cycles.items()
    ]


def _signs(found: Inspection) -> list[tuple[str, str]]:
    stats = found.stats
    return [
        ("repeated tokens", _count(stats.repeated_tokens, "equal the token before in all layers")),
        ("all-zero rows", _count(stats.zero_rows, "hold expert 0 only: padding?")),
        ("full rows", _count(stats.full_rows, "hold every expert: a warm-up batch?")),
        ("copied requests", _count(stats.copied_requests, "equal an earlier request entirely")),
        (
            "distinct heads",
            f"{stats.distinct_heads:,} of {stats.requests:,} (first {HEAD_TOKENS} tokens)",
        ),
    ]


def _count(number: int, meaning: str) -> str:
    return f"{number:,} {meaning}" if number else "none"
