"""Options shared by the commands that look closer at cells: compare, tune, explain, frontier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from simlab.cli.replay_options import (
    CONCURRENCY,
    MIB,
    PREFILL,
    SCHEDULE,
    SEMANTICS,
    UBATCH,
)
from simlab.errors import UsageError

if TYPE_CHECKING:
    from simlab.policy.loader import Policy
    from simlab.replay.cell import Cell
    from simlab.replay.run import Replayer

_CELLS = [
    click.option(
        "--slots",
        metavar="N|P%,...",
        help="Slots per group, or a share of its experts.  [default: 25%]",
    ),
    MIB,
    CONCURRENCY,
    SEMANTICS,
    PREFILL,
    SCHEDULE,
    UBATCH,
    click.option("--seed", default=0, show_default=True, help="Of all that is drawn."),
    click.option(
        "--n-expert", type=int, help="Experts of a layer, for a file that does not say it."
    ),
]
_ON_DECLINE = click.option(
    "--on-decline",
    default="stream",
    show_default=True,
    help="Who serves a miss the policy declines: stream (copied once) or cpu.",
)
_INTERVALS = [
    click.option("--resamples", default=10_000, show_default=True, help="Draws of the bootstrap."),
    click.option("--confidence", default=0.95, show_default=True, help="Of the intervals."),
    click.option(
        "--jobs", type=click.IntRange(1), help="Cells replayed at a time.  [default: cores]"
    ),
]
#: What Replayer takes of these options.
ENGINE = ("semantics", "on_decline", "prefill", "schedule", "ubatch", "seed")


def cell_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which cells are replayed, and under whose rules."""
    return _add([*_CELLS, _ON_DECLINE], command)


def cell_options_by_cpu(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same where only --on-decline cpu makes sense: without that option."""
    return _add(_CELLS, command)


def interval_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The bootstrap, and threads."""
    return _add(_INTERVALS, command)


def _add(options: list[Any], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def cells_of(
    replayer: Replayer,
    policies: Sequence[Policy],
    params: dict[str, float],
    slots: str | None,
    mib: str | None,
    concurrency: str,
) -> list[Cell]:
    """Policies in all sizes and concurrency levels asked for.

    Raises:
        UsageError: a size, a level or a parameter is not allowed.
    """
    from simlab.cli.options import numbers
    from simlab.replay.grid import cells_for
    from simlab.replay.sizes import parse_sizes

    if slots is not None and mib is not None:
        raise UsageError("give --slots or --moe-cache-mib, not both")
    return cells_for(
        replayer,
        policies,
        sizes=[] if mib is not None else parse_sizes(slots or "25%"),
        mib=[] if mib is None else numbers(mib, float, "--moe-cache-mib"),
        concurrency=numbers(concurrency, int, "--concurrency"),
        params=params,
    )


def heading(replayer: Replayer) -> list[str]:
    """What was simulated, as the first lines of an answer."""
    meta = replayer.trace.meta
    lines = [f"{replayer.trace_name}  (model: {meta.model})"]
    if meta.kind == "synthetic":
        lines.append("SYNTHETIC trace: no figure here speaks for a real model")
    lines.append(
        f"SIMULATED under the {replayer.semantics} semantics, prefill: {replayer.prefill}, on"
        f" decline: {replayer.on_decline}"
    )
    return lines


def size_of(cell: Cell) -> str:
    """A cell's size and concurrency in words."""
    if cell.budget_bytes is not None:
        size = f"{cell.budget_bytes / 2**20:,.0f} MiB"
    else:
        size = " + ".join(f"{n:,}" for n in cell.slots) + " slots"
    return f"{size}, C = {cell.concurrency}"
