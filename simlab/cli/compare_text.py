"""Intervals and comparisons as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from simlab.cli.lab_options import size_of

if TYPE_CHECKING:
    from simlab.analysis.bootstrap import Interval
    from simlab.analysis.compare import Comparison
    from simlab.result.schema import Result


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.2f} %"


def points(value: float) -> str:
    """A difference of shares."""
    return f"{100 * value:+.2f} points"


def amount(value: float) -> str:
    """A count with a few digits."""
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def with_interval(interval: Interval, show: Callable[[float], str]) -> str:
    """``50.11 % (49.80 .. 50.42)``; a dash where there is nothing."""
    if interval.estimate is None:
        return "-"
    text = show(interval.estimate)
    if interval.low is None or interval.high is None:
        return text
    low, high = (show(bound).split(" ")[0] for bound in (interval.low, interval.high))
    return f"{text} ({low} .. {high})"


def named(row: Result) -> str:
    """A policy with its parameters."""
    params = ", ".join(f"{name}={value:g}" for name, value in row.params.items())
    star = " *" if row.needs_engine_change else ""
    return f"{row.policy}@{row.policy_version}" + (f" ({params})" if params else "") + star


def interval_note(requests: int, confidence: float, resamples: int, concurrency: int) -> list[str]:
    """What the intervals mean, or why there are none."""
    from simlab.analysis.bootstrap import FEWEST

    if requests < FEWEST:
        return [
            f"{requests} request{'s' * (requests != 1)}: too few for intervals ({FEWEST} are the"
            " least), so nothing says how far these figures carry"
        ]
    lines = [
        f"({confidence:.0%} intervals, paired bootstrap over {requests} requests, {resamples:,}"
        " draws; they speak of other requests like these)"
    ]
    if requests < 20:
        lines.append("So few requests make intervals too narrow: take them as a hint")
    if concurrency > 1:
        lines.append(
            "At C > 1 a lookup that streams share counts for their requests in equal parts; what"
            " runs beside what is not drawn anew"
        )
    return lines


def comparison_lines(found: Sequence[Comparison], resamples: int) -> list[str]:
    """All cells, then what the intervals mean."""
    first = found[0]
    lines = [f"A: {named(first.rows[0])}", f"B: {named(first.rows[1])}"]
    if any(row.needs_engine_change for row in first.rows):
        lines.append("* needs an engine change: llama.cpp itself cannot decline a miss")
    for comparison in found:
        lines += ["", size_of(comparison.cell)]
        for one in comparison.differences:
            rate = one.metric.name == "hit_rate"
            show, change = (percent, points) if rate else (amount, lambda x: f"{x:+,.2f}")
            lines.append(
                f"  {'hit rate' if rate else 'MiB/token':<10} A {with_interval(one.a, show)}"
                f"   B {with_interval(one.b, show)}"
            )
            lines.append(f"  {'':<10} A - B {with_interval(one.difference, change)}: {one.verdict}")
    if len(first.differences) == 1:
        lines.append("Bytes unknown: the trace does not know its expert bytes (--expert-bytes)")
    last = first.differences[0].difference
    most = max(comparison.cell.concurrency for comparison in found)
    return [*lines, "", *interval_note(last.requests, last.confidence, resamples, most)]
