"""``simlab replay``: a trace under policies, sizes and concurrency levels."""

from __future__ import annotations

from typing import Any

import click

from simlab.cli.replay_options import replay_options
from simlab.errors import UsageError


@click.command("replay")
@click.argument("trace", required=False)
@replay_options
def command(
    trace: str | None,
    slots: str | None,
    mib: str | None,
    baselines: str | None,
    jobs: int | None,
    as_json: bool,
    out: str | None,
    **options: Any,
) -> None:
    """Replay TRACE through a cache and print hits, misses and bytes moved.

    Without TRACE the sample that ships with simlab is replayed; it is synthetic. The other sample,
    tiny-demo-model, goes by its name.
    """
    import json
    import os

    from simlab.cli.progress import bar
    from simlab.cli.replay_setup import prepare
    from simlab.cli.result_table import print_results
    from simlab.replay.baselines import baseline_results, parse_baselines
    from simlab.replay.grid import replay_grid
    from simlab.replay.sizes import parse_sizes
    from simlab.result.store import write_results

    if slots is not None and mib is not None:
        raise UsageError("give --slots or --moe-cache-mib, not both")
    sizes = [] if mib is not None else parse_sizes("10%,25%,50%" if slots is None else slots)
    replayer, cells = prepare(trace, sizes, mib=mib, out=out, **options)
    others = [] if baselines is None else parse_baselines(baselines)
    total = sum(len(replayer.access(cell.concurrency).set_step) for cell in cells)
    with bar("Replaying", total * len(replayer.pools)) as advance:
        results = list(
            replay_grid(replayer, cells, jobs=jobs or os.cpu_count() or 1, progress=advance)
        )
    results += baseline_results(replayer, others, cells)
    if out is not None:
        write_results(results, out)
    if as_json:
        click.echo(json.dumps([result.to_dict() for result in results]))
    else:
        print_results(results, sample=trace is None)
        if out is not None:
            click.echo(f"\nWritten: {out}")
