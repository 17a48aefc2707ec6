"""What ``simlab tune`` prints."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from simlab.cli.compare_text import amount, interval_note, percent, points, with_interval
from simlab.cli.lab_options import heading, size_of

if TYPE_CHECKING:
    from simlab.analysis.split import Split
    from simlab.analysis.tune import Tuned, Tuner


def tuned_lines(
    found: Sequence[Tuned], tuner: Tuner, parts: Split, path: str, sizes: Sequence[str]
) -> list[str]:
    """All cells, then what the intervals mean.

    Args:
        sizes: as typed, each with its option; every level of concurrency has all of them.
    """
    policy, metric, held_out = tuner.space.policy, tuner.metric, tuner.parts[1]
    lines = heading(held_out)
    lines[0] = f"{path}  (model: {held_out.trace.meta.model})"
    goal = {"hit_rate": "the highest hit rate", "bytes_moved": "the fewest bytes per token"}
    lines.append(
        f"Tuned: {policy.label} for {goal.get(metric.name, 'the fewest predicted milliseconds')}"
        f" on {parts.tuned_on}; reported on {parts.reported_on}"
    )
    if policy.declines:
        lines.append("* needs an engine change: llama.cpp itself cannot decline a miss")
    for i, one in enumerate(found):
        lines += ["", *_cell(one, tuner), f"  {_to_type(one, tuner, path, sizes[i % len(sizes)])}"]
    last = found[0].gain
    most = max(one.cell.concurrency for one in found)
    note = interval_note(last.requests, last.confidence, tuner.resamples, most)
    return [*lines, "", *(note if last.low is not None or last.estimate is None else [])]


def _cell(one: Tuned, tuner: Tuner) -> list[str]:
    metric = tuner.metric
    rate = metric.name == "hit_rate"
    show, change = (percent, points) if rate else (amount, lambda x: f"{x:+,.2f}")
    params = " ".join(f"{name}={value:g}" for name, value in one.params.items())
    lines = [f"{size_of(one.cell)}: {params}  ({one.tried} tried)"]
    known = [f"{name} {show(value)}" for name, value in one.tuned.items() if value is not None]
    unit = f", {metric.unit}" if metric.unit else ""
    lines.append(f"  tuned part   {metric.name}{unit}: {', '.join(known)}")
    if one.floor is not None:
        lines.append(f"  {'':<12} hit rate to keep: {percent(one.floor)}")
    for figures in one.held_out:
        row = figures.row
        star = " *" if row.needs_engine_change else " (bound)" if row.bound else ""
        text = f"  {figures.label + star:<20} hit rate {with_interval(figures.hit_rate, percent)}"
        if row.mib_per_token is not None:
            text += f"   MiB/token {with_interval(figures.mib_per_token, amount)}"
        if metric.name == "ms":
            text += f"   predicted ms/token {with_interval(figures.metric, amount)}"
        if figures.label in ("default", "tuned"):
            text += f"   LRU-OPT gap closed {with_interval(figures.gap_closed, percent)}"
        lines.append(text)
    gain = f"{with_interval(one.gain, change)} {metric.unit}".rstrip()
    lines.append(f"  better than the defaults by {gain}")
    if metric.name != "hit_rate" and one.bytes_ratio.estimate is not None:
        ratio = with_interval(one.bytes_ratio, lambda x: f"{x:,.2f}")
        lines.append(f"  LRU moves {ratio} times the bytes")
    return [*lines, *(f"  {warning}" for warning in one.warnings)]


def _to_type(one: Tuned, tuner: Tuner, path: str, size: str) -> str:
    """The replay of what was found."""
    replayer, cell = tuner.parts[1], one.cell
    policy = tuner.space.policy
    spec = policy.name if policy.path.stem.replace("_", "-") == policy.name else str(policy.path)
    words = ["simlab", "replay", path, "--policy", spec]
    for name, value in one.params.items():
        words += ["--param", f"{name}={value:.10g}"]
    words += [
        *size.split(" "),
        "--concurrency",
        str(cell.concurrency),
        "--semantics",
        replayer.semantics,
    ]
    return shlex.join([*words, "--on-decline", replayer.on_decline])
