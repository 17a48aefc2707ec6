"""``simlab live``: cells of a replay with real uploads, measured beside the simulation."""

from __future__ import annotations

from typing import Any

import click

from simlab.cli import live_model
from simlab.errors import SimlabError, UsageError


@click.command("live")
@click.argument("trace", required=False)
@click.option(
    "--policy",
    "policies",
    default="lru",
    show_default=True,
    metavar="NAME|FILE,...",
    help="Policies by name or file; not the bounds, which know the future.",
)
@click.option(
    "--param", "params", multiple=True, metavar="NAME=VALUE", help="A policy's parameter."
)
@click.option(
    "--slots",
    metavar="N|P%,...",
    help="Slots per group, or a share of a group's experts.  [default: 25%]",
)
@click.option("--mib", metavar="N,...", help="Budget as for --moe-cache-mib, in place of --slots.")
@click.option("--concurrency", default="1", show_default=True, metavar="C,...")
@click.option(
    "--device",
    "device_name",
    default="cuda",
    show_default=True,
    metavar="NAME",
    help="cuda, cuda:N, or cpu: ordinary memory in place of a GPU, not PCIe.",
)
@click.option("--link", metavar="FILE", help="Profile by simlab probe.  [default: a short probe]")
@click.option(
    "--bank-fraction",
    default=1.0,
    show_default=True,
    metavar="F",
    help="Of the layers that have bytes of their own in host memory; the others share them.",
)
@click.option("--compute", is_flag=True, help="Add a stand-in for the compute of the experts.")
@click.option("--no-baselines", is_flag=True, help="Leave out streaming and resident runs.")
@click.option("--repeat", default=1, show_default=True, help="Runs of each cell.")
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    metavar="N",
    help="Decode steps left out of the times.  [default: a tenth of them, at most 64]",
)
@click.option("--steps", type=int, metavar="N", help="Only the first N steps of the schedule.")
@click.option("--seconds", type=float, metavar="S", help="End a run after so many seconds.")
@click.option("--on-decline", default="stream", show_default=True, help="stream or cpu.")
@click.option("--prefill", default="engine", show_default=True, help="engine or skip.")
@click.option("--schedule", default="lanes", show_default=True, help="lanes or recorded.")
@click.option("--ubatch", default=512, show_default=True, help="Most tokens of a prefill step.")
@click.option("--seed", default=0, show_default=True, help="For policies that draw random numbers.")
@click.option("--n-expert", type=int, help="Experts of a layer, for a file that does not say it.")
@live_model.model_options
@click.option("--json", "as_json", is_flag=True, help="Print the result rows as a JSON list.")
@click.option("--out", metavar="FILE", help="Write the result rows to a .json or .parquet file.")
def command(
    trace: str | None,
    policies: str,
    params: tuple[str, ...],
    slots: str | None,
    mib: str | None,
    concurrency: str,
    device_name: str,
    link: str | None,
    bank_fraction: float,
    compute: bool,
    no_baselines: bool,
    repeat: int,
    warm_up: int | None,
    steps: int | None,
    seconds: float | None,
    on_decline: str,
    prefill: str,
    schedule: str,
    ubatch: int,
    seed: int,
    n_expert: int | None,
    as_json: bool,
    out: str | None,
    **_model: Any,
) -> int:
    """Run TRACE through a cache with real uploads, and set it beside its simulation.

    Experts of the trace's sizes lie in pinned host memory; each miss is copied into a slot on the
    device. Hits, misses and bytes must be those of simlab replay (exit code 1 if not); milliseconds
    are measured beside what the link's profile predicts. Three rows a cell: simulated, predicted,
    measured. Without TRACE the sample runs; it is synthetic.

    With --model a model runs instead, its experts computed from the slots: on the reference path
    every bit of its output is that of the model without a pool, and the replay of the picks
    captured on the way gives the same hits, misses and bytes (exit code 1 if not).
    """
    if live_model.check_options():
        return live_model.run(click.get_current_context().params)
    import json
    import os

    from simlab.cli.invocation import command_line
    from simlab.cli.options import load_policies, numbers, parameters
    from simlab.cli.progress import bar
    from simlab.cost.link import read_profile
    from simlab.live.cells import LiveCell, Options, live_cells
    from simlab.live.device import open_device
    from simlab.live.probe import quick_probe
    from simlab.live.table import cells_lines, name
    from simlab.replay.grid import cells_for
    from simlab.replay.run import Replayer
    from simlab.replay.sizes import parse_sizes
    from simlab.resources import find_trace
    from simlab.result.store import check_target, write_results
    from simlab.trace.read import read_trace

    if slots is not None and mib is not None:
        raise UsageError("give --slots or --mib, not both")
    chosen = load_policies([policies])
    sizes = [] if mib is not None else parse_sizes("25%" if slots is None else slots)
    budgets = [] if mib is None else numbers(mib, float, "--mib")
    lanes = numbers(concurrency, int, "--concurrency")
    if out is not None:
        check_target(out)
    profile = None if link is None else read_profile(link)
    options = Options(bank_fraction, compute, seconds, warm_up, repeat, not no_baselines)
    path = str(find_trace(trace))
    with open_device(device_name) as device:
        replayer = Replayer(
            read_trace(path, n_expert=n_expert),
            prefill=prefill,
            schedule=schedule,
            on_decline=on_decline,
            seed=seed,
            ubatch=ubatch,
            steps=steps,
            trace_name=os.path.basename(path),
            command=command_line(),
        )
        cells = cells_for(
            replayer,
            chosen,
            sizes=sizes,
            mib=budgets,
            concurrency=lanes,
            params=parameters(params),
        )
        profile = profile or quick_probe(device)
        total = sum(replayer.access(cell.concurrency).schedule.n_steps for cell in cells)
        found: list[LiveCell] = []
        failure: SimlabError | KeyboardInterrupt | None = None
        try:
            with bar("Running", total * repeat) as advance:
                for cell in live_cells(replayer, cells, device, profile, options, advance):
                    found.append(cell)
        except (SimlabError, KeyboardInterrupt) as exc:
            if not found:
                raise
            failure = exc
    rows = [row for cell in found for row in cell.rows]
    if out is not None:
        write_results(rows, out)
    if as_json:
        click.echo(json.dumps([row.to_dict() for row in rows]))
    else:
        click.echo("\n".join(cells_lines(found, profile)))
        if out is not None:
            click.echo(f"\nWritten: {out}")
    kept = f"{len(found)} of {len(cells)} cells are kept"
    if isinstance(failure, SimlabError):
        raise type(failure)(f"{failure} ({kept})")
    wrong = [cell for cell in found if cell.differences]
    if wrong:
        raise SimlabError(
            f"{len(wrong)} of {len(found)} cells differ from the simulation, the first:"
            f" {name(wrong[0].measured)}: {wrong[0].differences[0]}"
        )
    if failure is not None or found[-1].interrupted:
        click.echo(f"simlab: interrupted; {kept}", err=True)
        return 130
    return 0
