"""``simlab compare``: is one policy better than another, or was it the choice of requests?"""

from __future__ import annotations

from typing import Any

import click

from simlab.cli.lab_options import ENGINE, cell_options, interval_options
from simlab.errors import UsageError


@click.command("compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.argument("trace", required=False)
@cell_options
@interval_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--out", metavar="FILE", help="Write both policies' rows to a .json or .parquet file."
)
def command(
    a: str,
    b: str,
    trace: str | None,
    slots: str | None,
    mib: str | None,
    concurrency: str,
    n_expert: int | None,
    resamples: int,
    confidence: float,
    jobs: int | None,
    as_json: bool,
    out: str | None,
    **options: Any,
) -> None:
    """Tell whether policy A is better than policy B, with an interval over requests.

    A and B are policies by name or file, each with parameters of its own: lru, mix-tr:lift=0.5,
    ./mine.py:margin=1,half_life=8. Both see the same requests; those are drawn anew in pairs (a
    bootstrap), and a difference counts when its whole interval is on one side of 0.
    """
    import json
    import os
    import time

    from simlab.analysis.compare import compare
    from simlab.cli.compare_text import comparison_lines
    from simlab.cli.invocation import command_line
    from simlab.cli.lab_options import cells_of, heading
    from simlab.cli.options import policy_with_parameters
    from simlab.cli.progress import policy_prints
    from simlab.replay.provenance import provenance
    from simlab.replay.run import Replayer
    from simlab.resources import find_trace
    from simlab.result.store import check_target, write_results
    from simlab.trace.read import read_trace

    started = time.time()
    for spec in (a, b):
        if spec.endswith((".parquet", ".json")):
            raise UsageError(
                f"A and B are policies, and {spec} is none; rows that are there already lie side by"
                " side in 'simlab report FILE... --out x.html'"
            )
    chosen = [policy_with_parameters(spec) for spec in (a, b)]
    (one, p), (other, q) = chosen
    if one.hash == other.hash and one.values(p) == other.values(q):
        raise UsageError(f"A and B are the same policy with the same parameters ({one.label})")
    if out is not None:
        check_target(out)
    path = str(find_trace(trace))
    replayer = Replayer(
        read_trace(path, n_expert=n_expert),
        **{name: options[name] for name in ENGINE},
        trace_name=os.path.basename(path),
        command=command_line(),
    )
    cells = [
        cells_of(replayer, [policy], params, slots, mib, concurrency) for policy, params in chosen
    ]
    with policy_prints():
        found = compare(
            replayer,
            list(zip(*cells, strict=True)),
            resamples=resamples,
            seed=options["seed"],
            confidence=confidence,
            jobs=jobs or os.cpu_count() or 1,
        )
    if out is not None:
        write_results([row for comparison in found for row in comparison.rows], out)
    if as_json:
        told = {
            "a": {"policy": one.label, "params": one.values(p), "declines": one.declines},
            "b": {"policy": other.label, "params": other.values(q), "declines": other.declines},
            **{name: options[name] for name in ENGINE},
            "resamples": resamples,
            "cells": [comparison.to_dict() for comparison in found],
            "provenance": provenance(replayer.trace.meta, command_line(), started),
        }
        click.echo(json.dumps(told))
        return
    for line in [*heading(replayer), *comparison_lines(found, resamples)]:
        click.echo(line)
    if out is not None:
        click.echo(f"\nWritten: {out}")
