"""``simlab tune``: parameters searched on one part of a trace and reported on the other."""

from __future__ import annotations

from typing import Any

import click

from simlab.cli.lab_options import ENGINE, cell_options, interval_options
from simlab.errors import UsageError


@click.command("tune")
@click.argument("trace", required=False)
@click.option("--policy", required=True, metavar="NAME|FILE", help="The policy to tune.")
@click.option(
    "--metric",
    default="hit_rate",
    show_default=True,
    help="What is made best: hit_rate, bytes_moved or ms.",
)
@click.option(
    "--at-least-hit-rate",
    "floor",
    metavar="lru|RATE|none",
    help="Keep at least LRU's hit rate, or RATE (0.5, 50%).  [default: lru, where a policy that"
    " declines is tuned for bytes or ms; else none]",
)
@click.option(
    "--try",
    "tries",
    multiple=True,
    metavar="NAME=V,V,...",
    help="Values to try of a parameter, in place of those around its default.",
)
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Not to be tuned.")
@click.option("--budget", default=60, show_default=True, help="Replays a cell.")
@click.option(
    "--split",
    "how",
    default="first-half",
    show_default=True,
    help="Requests to tune on: first-half or random; or tokens: the first half of each request.",
)
@click.option(
    "--link",
    default="pcie4x16",
    show_default=True,
    metavar="LINK|FILE",
    help="For ms: pcie4x16, measured GB/s, or a profile by simlab probe.",
)
@click.option(
    "--cpu",
    default="ddr5x2",
    show_default=True,
    metavar="NAME|GB/s",
    help="For ms with --on-decline cpu: the host memory's speed.",
)
@click.option(
    "--step-ms", default=0.0, show_default=True, help="For ms: a step without any miss, measured."
)
@cell_options
@interval_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--out", metavar="FILE", help="Write the held-out part's rows to a .json or .parquet file."
)
def command(
    trace: str | None,
    policy: str,
    metric: str,
    floor: str | None,
    tries: tuple[str, ...],
    params: tuple[str, ...],
    budget: int,
    how: str,
    link: str,
    cpu: str,
    step_ms: float,
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
    """Search a policy's parameters on part of a trace, and report on the rest.

    Half of the requests is tuned on, the other half only reported on: what holds there holds for
    text that tuning never saw. A single request is cut in the middle of its tokens. Every size and
    concurrency is tuned by itself.
    """
    import json
    import os
    import time

    from simlab.analysis.search import space_of
    from simlab.analysis.split import split_trace
    from simlab.analysis.tune import Tuner
    from simlab.cli.invocation import command_line
    from simlab.cli.lab_options import cells_of
    from simlab.cli.options import parameters
    from simlab.cli.progress import bar
    from simlab.cli.tune_text import tuned_lines
    from simlab.cli.tune_values import chosen_floor, chosen_metric, tried_values
    from simlab.policy.registry import load_policy
    from simlab.replay.provenance import provenance
    from simlab.replay.run import Replayer
    from simlab.resources import find_trace
    from simlab.result.store import check_target, write_results
    from simlab.trace.read import read_trace

    started = time.time()
    chosen = load_policy(policy)
    given = parameters(params)
    if out is not None:
        check_target(out)
    measure = chosen_metric(metric, options["on_decline"], link=link, cpu=cpu, step_ms=step_ms)
    least = chosen_floor(floor, chosen, metric)
    space = space_of(chosen, given, tried_values(tries))
    path = str(find_trace(trace))
    parts = split_trace(read_trace(path, n_expert=n_expert), how, options["seed"])
    names = (parts.tuned_on, parts.reported_on)
    tuning, held_out = (
        Replayer(
            part,
            **{name: options[name] for name in ENGINE},
            trace_name=f"{os.path.basename(path)} ({name})",
            command=command_line(),
        )
        for part, name in zip((parts.tuning, parts.held_out), names, strict=True)
    )
    if metric != "hit_rate" and tuning.layer_bytes is None:
        raise UsageError(
            f"--metric {metric} needs the expert bytes: import the trace with --expert-bytes"
        )
    cells = cells_of(tuning, [chosen], given, slots, mib, concurrency)
    tuner = Tuner(
        tuning,
        held_out,
        space,
        measure,
        floor=least,
        budget=budget,
        seed=options["seed"],
        resamples=resamples,
        confidence=confidence,
        jobs=jobs or os.cpu_count() or 1,
    )
    with bar("Tuning", budget * len(cells)) as advance:
        found = [tuner.tune(cell, advance) for cell in cells]
    if out is not None:
        write_results([figures.row for one in found for figures in one.held_out], out)
    if as_json:
        told = {
            "policy": chosen.label,
            "metric": metric,
            "unit": measure.unit,
            "tuned_on": parts.tuned_on,
            "reported_on": parts.reported_on,
            **{name: options[name] for name in ENGINE},
            "resamples": resamples,
            "cells": [one.to_dict() for one in found],
            "provenance": provenance(tuning.trace.meta, command_line(), started),
        }
        click.echo(json.dumps(told))
        return
    option, typed = ("--slots", slots or "25%") if mib is None else ("--moe-cache-mib", mib)
    sizes = [f"{option} {size.strip()}" for size in typed.split(",")]
    for line in tuned_lines(found, tuner, parts, path, sizes):
        click.echo(line)
    if out is not None:
        click.echo(f"\nWritten: {out}")
