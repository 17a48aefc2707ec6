"""Live on the cpu device is the replay: every lookup, every run of copies, every slot."""

from __future__ import annotations

from dataclasses import asdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="live mode needs torch: pip install 'simlab[capture]'")

from live_cases import assert_as_replayed, live, loaded, real_trace, run_checking_every_slot
from naive_policies import POLICIES
from strategies import SmallTrace, small_trace, small_traces

from simlab.replay.cell import Cell
from simlab.replay.grid import cells_for
from simlab.replay.run import Replayer
from simlab.replay.sizes import parse_sizes

#: All that an engine could run.
EXECUTABLE = tuple(name for name in POLICIES if not name.startswith("opt"))
TRACES = {
    "gptoss20b_decode_a.parquet": 32,
    "dsv2lite_a.parquet": 64,
    "olmoe.parquet": 64,
}
STEPS = 150


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("name", TRACES)
def test_real_traces_live_are_real_traces_replayed(shared, name: str, concurrency: int) -> None:
    """Four policies at three sizes each."""
    trace = real_trace(shared / "traces" / name, TRACES[name])
    replayer = Replayer(trace, steps=STEPS)
    policies = [loaded(policy) for policy in ("lru", "mix", "lfu-decay", "arc")]
    sizes = parse_sizes("10%,25%,60%")
    cells = cells_for(replayer, policies, sizes=sizes, concurrency=[concurrency])
    found = live(replayer, cells)
    assert len(found) == 12
    for cell in found:
        assert cell.differences == ()
        assert asdict(cell.measured.counters) == asdict(cell.simulated.counters)
        assert cell.measured.by_layer == cell.simulated.by_layer
        assert cell.simulated.counters.lookups > 5_000
    assert {cell.measured.kind for cell in found} == {"measured"}
    assert len({cell.measured.counters.misses for cell in found}) > 6


@pytest.mark.parametrize("number", range(30))
def test_every_slot_holds_its_expert_after_every_step(number: int) -> None:
    """All policies on small traces: prompts, gates, groups without a slot, folded banks."""
    case, rnd = small_trace(Random(number)), Random(number)
    prefill = "engine" if all(row[2] == 0 for row in case.rows) or number % 3 else "skip"
    replayer = Replayer(
        case.trace, prefill=prefill, on_decline=rnd.choice(["stream", "cpu"]), seed=number
    )
    keys = [replayer.layout.keys_of(g) for g in range(len(replayer.layout.groups))]
    for policy in EXECUTABLE:
        slots = tuple(rnd.choice([0, case.shape.k, n // 3, n - 1, n]) for n in keys)
        cell = Cell(loaded(policy), slots, None, rnd.choice([1, 2, 3, 12]))
        run = run_checking_every_slot(replayer, cell, bank_fraction=rnd.choice([0.3, 1.0]))
        assert_as_replayed(run, replayer, cell)


@settings(max_examples=40, deadline=None)
@given(
    small_traces(),
    st.sampled_from(EXECUTABLE),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
    st.integers(1, 5),
    st.sampled_from(["lanes", "recorded"]),
    st.sampled_from(["stream", "cpu"]),
    st.integers(0, 2**31),
)
def test_any_policy_at_any_size_on_any_trace(
    case: SmallTrace,
    policy: str,
    shares: list[float],
    concurrency: int,
    schedule: str,
    on_decline: str,
    seed: int,
) -> None:
    replayer = Replayer(case.trace, schedule=schedule, on_decline=on_decline, seed=seed)
    slots = tuple(
        round(share * replayer.layout.keys_of(g))
        for g, share in zip(range(len(replayer.layout.groups)), shares, strict=False)
    )
    cell = Cell(loaded(policy), slots, None, 1 if schedule == "recorded" else concurrency)
    assert_as_replayed(run_checking_every_slot(replayer, cell), replayer, cell)
