"""What the tests of live mode share: one pass of a cell on the cpu device, checked step by step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from simlab.cost.link import LinkProfile
from simlab.live.bank import Bank
from simlab.live.cells import LiveCell, Options, live_cells
from simlab.live.device import Device, open_device
from simlab.live.engine import Engine, Run
from simlab.live.picks import picks_of
from simlab.live.planner import Planner
from simlab.live.serve import CachedPath
from simlab.model.layout import layout_of
from simlab.policy.loader import Policy
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.trace.read import read_trace
from simlab.trace.schema import Trace

LINK = LinkProfile(
    device="cpu",
    name="a test device",
    note=Device.note,
    peak_gb_s=10.0,
    bandwidth_gb_s=8.0,
    latency_us=1.0,
    ids_wait_us=1.0,
    limit_gb_s=None,
    limit_source="none",
    valid=True,
    problems=(),
)


@cache
def loaded(name: str) -> Policy:
    return load_policy(name)


@cache
def real_trace(path: Path, n_expert: int) -> Trace:
    """A real trace, given small experts: how large they are decides nothing but time."""
    trace = read_trace(str(path), n_expert=n_expert)
    sizes = tuple((8, 8, 16) if layer % 2 else (8, 8, 24) for layer in trace.meta.moe_layers)
    return Trace(
        trace.meta.with_(expert_bytes=sizes),
        trace.request, trace.token, trace.phase, trace.layer, trace.offsets, trace.experts,
    )  # fmt: skip


def live(
    replayer: Replayer, cells: Sequence[Cell], device: Device | None = None, **options: object
) -> list[LiveCell]:
    """Run cells on the cpu device."""
    chosen = Options(**{"baselines": False, **options})  # type: ignore[arg-type]
    if device is not None:
        return list(live_cells(replayer, cells, device, LINK, chosen))
    with open_device("cpu") as opened:
        return list(live_cells(replayer, cells, opened, LINK, chosen))


def run_checking_every_slot(replayer: Replayer, cell: Cell, *, bank_fraction: float = 1.0) -> Run:
    """One pass; after every step each slot's bytes are compared with those of its expert."""
    layout = layout_of(replayer.trace.meta)
    access = replayer.access(cell.concurrency)
    at = {
        layer: (g, i)
        for g, group in enumerate(layout.groups)
        for i, layer in enumerate(group.layers)
    }
    with open_device("cpu") as device:
        bank = Bank(layout, device, fraction=bank_fraction)
        layers = [at[layer] for layer in replayer.trace.meta.moe_layers]
        engine = Engine(device, bank, access, *picks_of(replayer.trace, access), layers, cell.slots)
        planner = Planner(cell.policy, layout, cell.slots, params=cell.params, seed=replayer.seed)
        run = Run.of(access)
        stream = replayer.on_decline == "stream"
        serve = [CachedPath(engine, g, planner, run, stream=stream) for g in range(len(cell.slots))]
        checked = 0

        def after_step(step: int) -> bool:
            nonlocal checked
            engine.check_slots(planner)
            checked += 1
            return False

        engine.run(serve, run, begin_step=planner.begin_step, after_step=after_step)
        assert checked == run.done == len(access.step_tokens)
    return run


def assert_as_replayed(run: Run, replayer: Replayer, cell: Cell) -> None:
    """Every lookup, every merged run and every byte as the replayer has them."""
    outcomes, row = replayer.outcomes(cell), replayer.run(cell)
    assert np.array_equal(run.experts, outcomes.access.experts)
    assert np.array_equal(run.outcome, outcomes.outcome)
    assert np.array_equal(run.runs, outcomes.runs)
    assert run.n_bytes.sum() == row.counters.bytes_moved
