"""``simlab curve``: a trace under policies at every size."""

from __future__ import annotations

from typing import Any

import click

from simlab.cli.replay_options import curve_options
from simlab.errors import UsageError


@click.command("curve")
@click.argument("trace", required=False)
@curve_options
def command(
    trace: str | None,
    slots: str | None,
    sizes: int | None,
    mib: str | None,
    approx: bool,
    jobs: int | None,
    as_json: bool,
    out: str | None,
    **options: Any,
) -> None:
    """Replay TRACE at every size: hit rate and bytes from 1 slot to all experts.

    One pass over the trace gives all sizes where that is exact, and each size is replayed where it
    is not. Without TRACE the synthetic sample is replayed.
    """
    import json
    import os

    from simlab.cli.progress import bar
    from simlab.cli.replay_setup import prepare
    from simlab.cli.result_table import print_results
    from simlab.replay.curve import plan_curve, run_curve
    from simlab.replay.curve_approx import run_approx
    from simlab.replay.sizes import curve_sizes, even_sizes, parse_sizes
    from simlab.result.store import write_results

    if sum(given is not None for given in (slots, sizes, mib)) > 1:
        raise UsageError("give one of --slots, --sizes and --moe-cache-mib")
    if mib is not None:
        asked = []
    elif sizes is not None:
        asked = even_sizes(sizes)
    elif slots is not None:
        asked = parse_sizes(slots)
    else:
        asked = curve_sizes()
        if options["semantics"] == "bmoe":
            asked = [size for size in asked if size.share is not None]
    replayer, cells = prepare(trace, asked, mib=mib, out=out, **options)
    # sizes that come to the same slots are one point
    cells = list(
        {(c.policy.hash, c.concurrency, c.slots, c.budget_bytes): c for c in cells}.values()
    )
    plan = plan_curve(replayer, cells)
    threads = jobs or os.cpu_count() or 1
    told = [plan.line()]
    with bar("Replaying", plan.work(replayer, cells)) as advance:
        if approx:
            results, errors = run_approx(replayer, cells, plan, jobs=threads, progress=advance)
            told += errors
        else:
            results = run_curve(replayer, cells, plan, jobs=threads, progress=advance)
    if out is not None:
        write_results(results, out)
    if as_json:
        click.echo(json.dumps([result.to_dict() for result in results]))
        click.echo("\n".join(told), err=True)
    else:
        print_results(results, sample=trace is None)
        click.echo("\n".join(told))
        if out is not None:
            click.echo(f"\nWritten: {out}")
