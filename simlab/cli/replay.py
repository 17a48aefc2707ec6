"""``simlab replay``: a trace under policies, sizes and concurrency levels."""

from __future__ import annotations

import click

from simlab.cli.replay_options import replay_options
from simlab.errors import UsageError


@click.command("replay")
@click.argument("trace", required=False)
@replay_options
def command(
    trace: str | None,
    policies: tuple[str, ...],
    params: tuple[str, ...],
    slots: str | None,
    mib: str | None,
    layout: str | None,
    dtype: str | None,
    n_cpu_moe: int | None,
    host_layers: str | None,
    tensor_split: str | None,
    concurrency: str,
    semantics: str,
    on_decline: str,
    prefill: str,
    schedule: str,
    ubatch: int,
    seed: int,
    capacity: str | None,
    draft: int,
    acceptance: float,
    baselines: str | None,
    pin: int,
    pin_from: str | None,
    n_expert: int | None,
    jobs: int | None,
    as_json: bool,
    out: str | None,
) -> None:
    """Replay TRACE through a cache and print hits, misses and bytes moved.

    Without TRACE the sample that ships with simlab is replayed; it is synthetic. The other sample,
    tiny-demo-model, goes by its name.
    """
    import json
    import os

    from simlab.cli.invocation import command_line
    from simlab.cli.options import chosen_policies, numbers, parameters
    from simlab.cli.progress import bar
    from simlab.cli.result_table import print_results
    from simlab.replay.baselines import baseline_results, parse_baselines
    from simlab.replay.capacity import read_capacity
    from simlab.replay.grid import cells_for, replay_grid
    from simlab.replay.run import Replayer
    from simlab.replay.sizes import parse_sizes
    from simlab.resources import find_trace
    from simlab.result.store import check_target, write_results
    from simlab.trace.read import read_trace

    if slots is not None and mib is not None:
        raise UsageError("give --slots or --moe-cache-mib, not both")
    if layout is None and any((dtype, n_cpu_moe, host_layers, tensor_split)):
        raise UsageError("--dtype, --n-cpu-moe, --host-layers and --tensor-split need --layout")
    if pin_from is not None and not pin:
        raise UsageError("--pin-from needs --pin")
    chosen = chosen_policies(policies)
    given = parameters(params)
    sizes = [] if mib is not None else parse_sizes("10%,25%,50%" if slots is None else slots)
    budgets = [] if mib is None else numbers(mib, float, "--moe-cache-mib")
    lanes = numbers(concurrency, int, "--concurrency")
    if out is not None:
        check_target(out)
    path = str(find_trace(trace))
    placement = None
    if layout is not None:
        from simlab.model.placement import place

        placement = place(
            layout,
            dtype=dtype,
            host_layers=host_layers,
            n_cpu_moe=n_cpu_moe,
            tensor_split=tensor_split,
        )
    picks = read_trace(path, n_expert=n_expert)
    if "all" in policies and picks.weights is None:
        for policy in [policy for policy in chosen if policy.reads_weights]:
            if policy.name not in policies:
                chosen.remove(policy)
                click.echo(f"Without {policy.name}: the trace has no router weights.", err=True)
    replayer = Replayer(
        picks,
        layout=placement.layout if placement else None,
        layout_name=placement.shape.name if placement else "",
        pin=pin,
        draft=draft,
        acceptance=acceptance,
        capacity=None if capacity is None else read_capacity(capacity),
        pin_from=None if pin_from is None else read_trace(pin_from, n_expert=n_expert),
        semantics=semantics,
        prefill=prefill,
        schedule=schedule,
        on_decline=on_decline,
        seed=seed,
        ubatch=ubatch,
        trace_name=os.path.basename(path),
        command=command_line(),
    )
    cells = cells_for(
        replayer,
        chosen,
        sizes=sizes,
        mib=budgets,
        split=placement.split if placement else None,
        concurrency=lanes,
        params=given,
    )
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
