"""Result rows as a table for people: what was simulated, then a line a cell."""

from __future__ import annotations

from collections.abc import Sequence

import click

from simlab.result.schema import Result


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _slots(result: Result) -> str:
    each = set(result.slots)
    text = f"{result.slots[0]:,}" if len(each) == 1 else ";".join(f"{n:,}" for n in result.slots)
    groups = len(result.slots)
    return f"{text} x {groups}" if groups > 1 and len(each) == 1 else text


def _label(result: Result) -> str:
    params = ", ".join(f"{name}={value:g}" for name, value in result.params.items())
    label = result.policy + (f"({params})" if params else "")
    if result.bound:
        label += " (bound)"
    return label + (" *" if result.needs_engine_change else "")


def print_results(results: Sequence[Result], *, sample: bool = False) -> None:
    """Print to stdout."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    first = results[0]
    lines = [f"{first.trace_name}  (model: {first.model})"]
    if first.synthetic:
        what = "the sample that ships with simlab is synthetic" if sample else "synthetic trace"
        lines.append(f"SYNTHETIC: {what}; no figure here speaks for a real model")
    lines.append(
        f"SIMULATED under the {first.semantics} semantics, schedule: {first.schedule}"
        f", prefill: {first.prefill}, on decline: {first.on_decline}"
    )
    if first.semantics == "llama.cpp":
        lines.append("hit rate: over the cached path (steps of 1 to 32 tokens that fit the pool)")
    if first.counters.bytes_moved is None:
        lines.append("Bytes unknown: the trace does not know its expert bytes (--expert-bytes)")
    click.echo("\n".join(lines) + "\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for column in (
        "C",
        "slots",
        "share",
        "hit rate",
        "lookups",
        "misses",
        "uploads/token",
        "MiB/token",
        "streamed",
        "cpu served",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for r in results:
        c = r.counters
        size = (
            f"{r.capacity_bytes / 2**20:,.0f} MiB"
            if r.semantics == "bmoe" and r.capacity_bytes
            else _slots(r)
        )
        table.add_row(
            _label(r),
            str(r.concurrency),
            size,
            _rate(r.slots_share),
            _rate(r.hit_rate),
            f"{c.lookups:,}",
            f"{c.misses:,}",
            _number(r.uploads_per_token, 2),
            _number(r.mib_per_token, 2),
            f"{c.streamed:,}",
            f"{c.cpu_served:,}",
        )
    # numbers are never cut: in a narrow terminal, or a pipe, lines run on
    width = Measurement.get(Console(width=500), Console(width=500).options, table).maximum
    Console(width=width, markup=False, highlight=False).print(table)
    notes = list(dict.fromkeys(note for r in results for note in r.notes))
    if any(r.needs_engine_change for r in results):
        notes.insert(0, "* needs an engine change: llama.cpp itself cannot decline a miss")
    if any(r.hit_rate is None for r in results):
        notes.append("hit rate -: no step passed the gate, everything was streamed")
    for note in notes:
        click.echo(note)
