"""From the options of ``simlab replay`` and ``simlab curve`` to a replayer and its cells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from simlab.errors import UsageError

if TYPE_CHECKING:
    from simlab.replay.cell import Cell
    from simlab.replay.run import Replayer
    from simlab.replay.sizes import Size


def prepare(
    trace: str | None,
    sizes: Sequence[Size],
    *,
    policies: tuple[str, ...],
    params: tuple[str, ...],
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
    pin: int,
    pin_from: str | None,
    n_expert: int | None,
    out: str | None,
) -> tuple[Replayer, list[Cell]]:
    """Read the trace and lay out its cells; options as typed.

    Raises:
        UsageError: an option is not allowed, or does not go with another. SimlabError: a file is
            unusable.
    """
    from simlab.cli.invocation import command_line
    from simlab.cli.options import chosen_policies, numbers, parameters
    from simlab.replay.capacity import read_capacity
    from simlab.replay.grid import cells_for
    from simlab.replay.run import Replayer
    from simlab.resources import find_trace
    from simlab.result.store import check_target
    from simlab.trace.read import read_trace

    if layout is None and any((dtype, n_cpu_moe, host_layers, tensor_split)):
        raise UsageError("--dtype, --n-cpu-moe, --host-layers and --tensor-split need --layout")
    if pin_from is not None and not pin:
        raise UsageError("--pin-from needs --pin")
    chosen = chosen_policies(policies)
    given = parameters(params)
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
    return replayer, cells
