"""``simlab frontier``: the most hits that any policy could have for its uploads."""

from __future__ import annotations

from typing import Any

import click

from simlab.cli.lab_options import ENGINE, cell_options_by_cpu
from simlab.errors import UsageError


@click.command("frontier")
@click.argument("trace", required=False)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=["lru,lrfu-admit,opt"],
    show_default=True,
    metavar="NAME|FILE,...",
    help="Policies to set beside it.",
)
@click.option(
    "--param", "params", multiple=True, metavar="NAME=VALUE", help="A policy's parameter."
)
@click.option(
    "--mu",
    "mus",
    default="0,0.5,1,2,4,8,16",
    show_default=True,
    metavar="MU,...",
    help="Points: how many hits an upload has to earn.",
)
@click.option(
    "--windows",
    default="3",
    show_default=True,
    metavar="N|all",
    help="Windows of a long run, spread from its first to its last step.",
)
@click.option(
    "--window-steps", type=int, metavar="N", help="Steps of a window.  [default: ~20,000 lookups]"
)
@click.option(
    "--on-decline",
    default="cpu",
    show_default=True,
    help="cpu only: streamed misses cost what uploads cost, and nothing is left to trade.",
)
@cell_options_by_cpu
@click.option("--jobs", type=click.IntRange(1), help="Networks solved at a time.  [default: cores]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    trace: str | None,
    policies: tuple[str, ...],
    params: tuple[str, ...],
    mus: str,
    windows: str,
    window_steps: int | None,
    slots: str | None,
    mib: str | None,
    concurrency: str,
    n_expert: int | None,
    jobs: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compute the most hits that any policy could have for the bytes that it uploads.

    A min-cost flow, exact in windows of the run that each start from an empty cache; policies are
    replayed in the same windows. Misses that fill no slot are served by the CPU and cost no bytes.
    Needs OR-tools: pip install 'simlab[frontier]'.
    """
    import json
    import os
    import time

    from simlab.analysis.flow import need_solver
    from simlab.analysis.frontier import frontier
    from simlab.cli.frontier_text import frontier_lines
    from simlab.cli.invocation import command_line
    from simlab.cli.lab_options import cells_of
    from simlab.cli.options import chosen_policies, numbers, parameters
    from simlab.cli.progress import bar
    from simlab.replay.provenance import provenance
    from simlab.replay.run import Replayer
    from simlab.resources import find_trace
    from simlab.trace.read import read_trace

    started = time.time()
    need_solver()
    if windows != "all" and not windows.isdecimal():
        raise UsageError(f"--windows takes a number or all, not {windows!r}")
    wanted = numbers(mus, float, "--mu")
    chosen = chosen_policies(policies)
    path = str(find_trace(trace))
    replayer = Replayer(
        read_trace(path, n_expert=n_expert),
        **{name: options[name] for name in ENGINE},
        trace_name=os.path.basename(path),
        command=command_line(),
    )
    cells = cells_of(replayer, chosen, parameters(params), slots, mib, concurrency)
    each: dict[Any, list[Any]] = {}  # of one size and concurrency
    for cell in cells:
        each.setdefault((cell.concurrency, cell.slots, cell.budget_bytes), []).append(cell)
    with bar("Solving", len(set(wanted)) * len(each)) as advance:
        found = [
            frontier(
                replayer,
                group[0],
                group,
                mus=wanted,
                windows=None if windows == "all" else int(windows),
                window_steps=window_steps,
                jobs=jobs or os.cpu_count() or 1,
                done=advance,
            )
            for group in each.values()
        ]
    if as_json:
        told = {
            **{name: options[name] for name in ENGINE},
            "cells": [one.to_dict() for one in found],
            "provenance": provenance(replayer.trace.meta, command_line(), started),
        }
        click.echo(json.dumps(told))
        return
    for line in frontier_lines(found, replayer):
        click.echo(line)
