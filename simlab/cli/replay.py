"""``simlab replay``: a trace under policies, sizes and concurrency levels."""

from __future__ import annotations

from typing import Any

import click

from simlab.errors import UsageError


def _numbers(text: str, kind: type, what: str) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{what} takes numbers separated by commas, not {text!r}") from None


@click.command("replay")
@click.argument("trace", required=False)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=["lru"],
    show_default=True,
    metavar="NAME|FILE,...",
    help="Policies by name or file, or 'all' (see: simlab policies list); may be repeated.",
)
@click.option(
    "--param", "params", multiple=True, metavar="NAME=VALUE", help="A policy's parameter."
)
@click.option(
    "--slots",
    metavar="N|P%,...",
    help="Slots per group, or a share of a group's experts.  [default: 10%,25%,50%]",
)
@click.option("--mib", metavar="N,...", help="Budget as for --moe-cache-mib, in place of --slots.")
@click.option(
    "--concurrency",
    default="1",
    show_default=True,
    metavar="C,...",
    help="Streams decoded together.",
)
@click.option(
    "--semantics",
    default="llama.cpp",
    show_default=True,
    help="Which engine's rules: llama.cpp, per-pick or bmoe.",
)
@click.option(
    "--on-decline",
    default="stream",
    show_default=True,
    help="Who serves a miss the policy declines: stream (copied once) or cpu.",
)
@click.option(
    "--prefill",
    default="engine",
    show_default=True,
    help="engine: prompts are computed; skip: their rows are left out.",
)
@click.option(
    "--schedule",
    default="lanes",
    show_default=True,
    help="lanes, or recorded: the steps that the trace recorded.",
)
@click.option("--ubatch", default=512, show_default=True, help="Most tokens of a prefill step.")
@click.option("--seed", default=0, show_default=True, help="For policies that draw random numbers.")
@click.option("--n-expert", type=int, help="Experts of a layer, for a file that does not say it.")
@click.option("--jobs", type=click.IntRange(1), help="Cells replayed at a time.  [default: cores]")
@click.option("--json", "as_json", is_flag=True, help="Print the result rows as a JSON list.")
@click.option("--out", metavar="FILE", help="Write the result rows to a .json or .parquet file.")
def command(
    trace: str | None,
    policies: tuple[str, ...],
    params: tuple[str, ...],
    slots: str | None,
    mib: str | None,
    concurrency: str,
    semantics: str,
    on_decline: str,
    prefill: str,
    schedule: str,
    ubatch: int,
    seed: int,
    n_expert: int | None,
    jobs: int | None,
    as_json: bool,
    out: str | None,
) -> None:
    """Replay TRACE through a cache and print hits, misses and bytes moved.

    Without TRACE the sample that ships with simlab is replayed; it is synthetic.
    """
    import json
    import os

    from simlab.cli.invocation import command_line
    from simlab.cli.progress import bar
    from simlab.cli.result_table import print_results
    from simlab.policy.registry import load_policies, policy_names
    from simlab.replay.grid import cells_for, replay_grid
    from simlab.replay.run import Replayer
    from simlab.replay.sizes import parse_sizes
    from simlab.resources import default_trace
    from simlab.result.store import check_target, write_results
    from simlab.trace.read import read_trace

    if slots is not None and mib is not None:
        raise UsageError("give --slots or --mib, not both")
    names: list[str] = []
    for text in policies:
        if text == "all":
            names += policy_names()
        else:  # a file's name may hold a comma
            names += [text] if os.path.isfile(text) else [p.strip() for p in text.split(",")]
    chosen = load_policies(dict.fromkeys(names))
    given = {}
    for text in params:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--param takes NAME=VALUE, not {text!r}")
        try:
            given[name] = float(value)
        except ValueError:
            raise UsageError(f"--param {name} takes one number, not {value!r}") from None
    sizes = [] if mib is not None else parse_sizes("10%,25%,50%" if slots is None else slots)
    budgets = [] if mib is None else _numbers(mib, float, "--mib")
    lanes = _numbers(concurrency, int, "--concurrency")
    if out is not None:
        check_target(out)
    path = str(default_trace() if trace is None else trace)
    picks = read_trace(path, n_expert=n_expert)
    if "all" in policies and picks.weights is None:
        for policy in [policy for policy in chosen if policy.reads_weights]:
            if policy.name not in policies:
                chosen.remove(policy)
                click.echo(f"Without {policy.name}: the trace has no router weights.", err=True)
    replayer = Replayer(
        picks,
        semantics=semantics,
        prefill=prefill,
        schedule=schedule,
        on_decline=on_decline,
        seed=seed,
        ubatch=ubatch,
        trace_name=os.path.basename(path),
        command=command_line(),
    )
    cells = cells_for(replayer, chosen, sizes=sizes, mib=budgets, concurrency=lanes, params=given)
    total = sum(len(replayer.access(cell.concurrency).set_step) for cell in cells)
    with bar("Replaying", total * len(replayer.pools)) as advance:
        results = list(
            replay_grid(replayer, cells, jobs=jobs or os.cpu_count() or 1, progress=advance)
        )
    if out is not None:
        write_results(results, out)
    if as_json:
        click.echo(json.dumps([result.to_dict() for result in results]))
    else:
        print_results(results, sample=trace is None)
        if out is not None:
            click.echo(f"\nWritten: {out}")
