"""``simlab explain``: why a policy misses."""

from __future__ import annotations

from typing import Any

import click

from simlab.cli.lab_options import ENGINE, cell_options
from simlab.errors import UsageError

PARTS = ("layer", "expert", "window", "tag")


@click.command("explain")
@click.argument("trace", required=False)
@click.option(
    "--policy", default="lru", show_default=True, metavar="NAME|FILE", help="Whose misses."
)
@click.option(
    "--param", "params", multiple=True, metavar="NAME=VALUE", help="A parameter of the policy."
)
@click.option(
    "--bound",
    default="opt",
    show_default=True,
    help="What it is set beside: opt, or opt-bypass, which may decline.",
)
@click.option(
    "--by",
    default="layer,tag",
    show_default=True,
    metavar="PART,...",
    help="Tables of parts: layer, expert, window, tag, or all.",
)
@click.option("--top", default=10, show_default=True, help="Lines of a table, worst first; 0: all.")
@cell_options
@click.option("--jobs", type=click.IntRange(1), help="Cells replayed at a time.  [default: cores]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all parts.")
def command(
    trace: str | None,
    policy: str,
    params: tuple[str, ...],
    bound: str,
    by: str,
    top: int,
    slots: str | None,
    mib: str | None,
    concurrency: str,
    n_expert: int | None,
    jobs: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Tell why a policy misses: cold, capacity, or its own choice.

    A miss is cold when its key was never looked up before; capacity when the optimum misses it too;
    else the policy's. Beside that: the cliff, reuse distances, and what became of declined misses.
    """
    import json
    import os
    import time

    from simlab.analysis.explain import explain
    from simlab.cli.explain_text import explained_lines
    from simlab.cli.invocation import command_line
    from simlab.cli.lab_options import cells_of
    from simlab.cli.options import parameters
    from simlab.cli.progress import policy_prints
    from simlab.policy.registry import load_policy
    from simlab.replay.provenance import provenance
    from simlab.replay.run import Replayer
    from simlab.resources import find_trace
    from simlab.trace.read import read_trace

    started = time.time()
    parts = list(PARTS) if by == "all" else [part.strip() for part in by.split(",")]
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--by takes {', '.join(PARTS)} or all, not {part!r}")
    if top < 0:
        raise UsageError(f"--top must be 0 or more, not {top}")
    chosen = load_policy(policy)
    path = str(find_trace(trace))
    replayer = Replayer(
        read_trace(path, n_expert=n_expert),
        **{name: options[name] for name in ENGINE},
        trace_name=os.path.basename(path),
        command=command_line(),
    )
    cells = cells_of(replayer, [chosen], parameters(params), slots, mib, concurrency)
    with policy_prints():
        found = explain(replayer, cells, bound=bound, jobs=jobs or os.cpu_count() or 1)
    if as_json:
        told = {
            "policy": chosen.label,
            **{name: options[name] for name in ENGINE},
            "cells": [one.to_dict() for one in found],
            "provenance": provenance(replayer.trace.meta, command_line(), started),
        }
        click.echo(json.dumps(told))
        return
    for line in explained_lines(found, replayer, parts, top):
        click.echo(line)
