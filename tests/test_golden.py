"""Golden figures: llama.cpp's own slot planner, OPT, the seed's toy table, BigMoeOnEdge's records.

Sources: shared/golden/README.md and shared/traces/README.md.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from simlab.model.budget import MIB
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.kernel import HIT
from simlab.replay.run import Replayer, replay_cell
from simlab.trace.importers import import_trace
from simlab.trace.importers.bmoe import read_recorded_flags
from simlab.trace.importers.options import ImportOptions
from simlab.trace.schema import Trace
from simlab.trace.synth_toy import toy_trace

TRACES = {
    "gptoss20b_decode_a": (32, 4, "13219200"),
    "dsv2lite_a": (64, 6, "4866048"),
    "olmoe": (64, 8, "3538944"),
}


@pytest.fixture(scope="module")
def traces(shared: Path) -> Iterator[dict[str, Trace]]:
    """The three real traces; every row is a decode token."""
    yield {
        name: import_trace(
            "parquet",
            shared / "traces" / f"{name}.parquet",
            ImportOptions(n_expert=n_expert, k=k, expert_bytes=size, phase="decode"),
        )
        for name, (n_expert, k, size) in TRACES.items()
    }


def golden(shared: Path, name: str) -> list[dict[str, str]]:
    with open(shared / "golden" / name, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", TRACES)
def test_lru_is_llama_cpps_planner(shared: Path, traces: dict[str, Trace], name: str) -> None:
    replayer = Replayer(traces[name], prefill="skip")
    rows = [row for row in golden(shared, "llamacpp_lru.csv") if row["trace"] == name]
    assert len(rows) == 18
    for row in rows:
        cell = Cell(load_policy("lru"), (int(row["slots"]),), None, int(row["concurrency"]))
        counters = replayer.run(cell).counters
        for counter in ("steps", "lookups", "hits", "misses", "merged_runs"):
            assert getattr(counters, counter) == int(row[counter]), (row, counter)
        size = int(TRACES[name][2])
        assert counters.bytes_moved == counters.demand_uploads * size


@pytest.mark.parametrize("name", TRACES)
def test_opt(shared: Path, traces: dict[str, Trace], name: str) -> None:
    replayer = Replayer(traces[name], prefill="skip")
    rows = [row for row in golden(shared, "opt.csv") if row["trace"] == name]
    assert len(rows) == 18
    for row in rows:
        cell = Cell(load_policy("opt"), (int(row["slots"]),), None, int(row["concurrency"]))
        assert replayer.run(cell).counters.misses == int(row["opt_misses"]), row


def test_two_groups_are_llama_cpps(shared: Path) -> None:
    rows = golden(shared, "llamacpp_lru_groups.csv")
    assert len(rows) == 16
    for name in ("gptoss20b_decode_a", "olmoe"):
        mine = [row for row in rows if row["trace"] == name]
        n_expert, k, size = TRACES[name]
        first, second = (int(part.split()[0]) for part in mine[0]["groups"].split(" + "))
        spec = f"0-{first - 1}:{size},{first}-{first + second - 1}:{int(size) + 1}"
        trace = import_trace(
            "parquet",
            shared / "traces" / f"{name}.parquet",
            ImportOptions(n_expert=n_expert, k=k, expert_bytes=spec, phase="decode"),
        )
        replayer = Replayer(trace, prefill="skip")
        for row in mine:
            slots = int(row["slots_per_group"])
            cell = Cell(load_policy("lru"), (slots, slots), None, int(row["concurrency"]))
            counters = replayer.run(cell).counters
            for counter in ("lookups", "hits", "misses", "merged_runs"):
                assert getattr(counters, counter) == int(row[counter]), (row, counter)


def test_toy_table_of_article_000(shared: Path) -> None:
    rows = golden(shared, "toy.csv")
    assert len(rows) == 12
    for row in rows:
        trace = toy_trace(float(row["stickiness"]))
        for policy, column in (("lru", "lru"), ("lfu-decay", "lfu")):
            counters = replay_cell(
                trace, policy=policy, slots=int(row["slots"]), semantics="per-pick"
            ).counters
            rate = 100 * counters.hits / counters.lookups
            assert f"{rate:.1f}" == row[f"{column}_hit_pct"], (row, policy)
            per_token = counters.misses / counters.tokens
            assert f"{per_token:.2f}" == row[f"{column}_misses_per_token"], (row, policy)


BMOE = {"qwen": (4000, 29_597, 39_526), "gptoss": (3000, 2_066, 6_375)}


@pytest.mark.parametrize("name", BMOE)
def test_recorded_residency(shared: Path, name: str) -> None:
    """Every residency flag that the phone recorded, lookup by lookup."""
    budget, hits, lookups = BMOE[name]
    path = shared / "traces" / "bmoe" / f"{name}.route.csv"
    trace = import_trace("bmoe", path, ImportOptions())
    replayer = Replayer(trace, semantics="bmoe")
    found = replayer.outcomes(Cell(load_policy("lru"), (), budget * MIB))
    access = found.access
    set_of = np.repeat(np.arange(len(access.set_step)), np.diff(access.offsets))
    key = (access.set_step[set_of], access.set_layer[set_of], access.experts)
    simulated = {
        (int(step), int(layer), int(expert)): bool(outcome == HIT)
        for step, layer, expert, outcome in zip(*key, found.outcome, strict=True)
    }
    flags = read_recorded_flags(path)
    # the whole prompt is step 0, each decode token a step of its own
    prompt = int(trace.token[trace.phase == 0].max())
    position = {layer: i for i, layer in enumerate(trace.meta.moe_layers)}
    recorded = {
        (max(0, int(token - prompt)), position[int(layer)], int(expert)): bool(resident)
        for token, layer, expert, resident in zip(
            flags.token, flags.layer, flags.expert, flags.residency, strict=True
        )
    }
    assert len(simulated) == lookups
    assert sum(simulated.values()) == hits
    assert simulated == recorded


@pytest.mark.parametrize("name", BMOE)
def test_bmoe_curves(shared: Path, name: str) -> None:
    """LRU and Belady rows of that project's own replay script."""
    path = shared / "traces" / "bmoe"
    trace = import_trace("bmoe", path / f"{name}.route.csv", ImportOptions())
    replayer = Replayer(trace, semantics="bmoe")
    with open(path / f"{name}-curve.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["policy"] in ("lru", "belady")]
    assert len(rows) >= 20
    for row in rows:
        policy = load_policy({"lru": "lru", "belady": "opt"}[row["policy"]])
        result = replayer.run(Cell(policy, (), int(row["budget_mib"]) * MIB))
        assert result.hit_rate is not None
        assert f"{100 * result.hit_rate:.3f}" == row["hit_pct_cum"], row
        decode = result.by_phase["decode"]
        assert f"{100 * decode.hits / decode.lookups:.3f}" == row["hit_pct_decode"], row
        assert result.counters.bytes_moved is not None
        assert f"{result.counters.bytes_moved / MIB:.1f}" == row["read_mib"], row
