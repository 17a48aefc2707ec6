"""The naive twin against recorded facts: llama.cpp's planner, a phone's cache, the toy's table.

Only the twin is called here, so an error that it shares with the product still shows.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from random import Random

import polars as pl
import pytest
from naive import Row, Run, Shape, prepare, replay
from naive_bounds import fewest_misses, fewest_misses_bypassing
from strategies import small_trace

CONCURRENCY = 4


def golden(shared: Path, name: str, **wanted: str) -> list[dict[str, str]]:
    """Rows of a golden table that have the wanted values."""
    with (shared / "golden" / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def olmoe(shared: Path, groups: list[list[int]]) -> Run:
    """The OLMoE trace with every row a decode token."""
    table = pl.read_parquet(shared / "traces" / "olmoe.parquet")
    rows: list[Row] = [(r, t, 1, layer, e) for r, t, layer, e in table.iter_rows()]
    return prepare(rows, Shape(groups, 64, 8), concurrency=CONCURRENCY)


def test_lru_is_llama_cpps_planner_and_opt_is_the_golden_bound(shared: Path) -> None:
    run = olmoe(shared, [list(range(16))])
    wanted = {"trace": "olmoe", "concurrency": str(CONCURRENCY)}
    bound = {row["slots"]: int(row["opt_misses"]) for row in golden(shared, "opt", **wanted)}
    rows = golden(shared, "llamacpp_lru", **wanted)
    assert len(rows) == 6
    for row in rows:
        total = replay(run, "lru", [int(row["slots"])]).total
        for name in ("steps", "lookups", "hits", "misses", "merged_runs"):
            assert total[name] == int(row[name]), (row, name)
        if row["slots"] in ("64", "256"):
            assert replay(run, "opt", [int(row["slots"])]).total["misses"] == bound[row["slots"]]


def test_two_groups_are_llama_cpps(shared: Path) -> None:
    run = olmoe(shared, [list(range(8)), list(range(8, 16))])
    rows = golden(shared, "llamacpp_lru_groups", trace="olmoe", concurrency=str(CONCURRENCY))
    assert len(rows) == 4
    for row in rows:
        total = replay(run, "lru", [int(row["slots_per_group"])] * 2).total
        for name in ("lookups", "hits", "misses", "merged_runs"):
            assert total[name] == int(row[name]), (row, name)


# ---- bmoe ---------------------------------------------------------------------------------------


def bmoe(path: Path) -> tuple[list[Row], dict[int, int], dict[tuple[int, int, int], bool]]:
    """Rows, bytes of one expert per layer, and the recorded flag per (batch, layer, expert)."""
    text = path.read_text().splitlines()
    header = [line for line in text if line.startswith("#")]
    found = (re.match(r"# layer=(\d+) expert_bytes=(\d+)", line) for line in header)
    expert_bytes = {int(m[1]): int(m[2]) for m in found if m}
    picks: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    flags: dict[tuple[int, int, int], bool] = {}
    table = list(csv.DictReader(text[len(header) :]))
    prompt = 1 + max(int(r["step"]) for r in table if r["phase"] == "0")
    for r in table:
        token, layer, expert = int(r["step"]), int(r["layer"]), int(r["expert"])
        phase = int(r["phase"])
        picks.setdefault((token, phase, layer), []).append((int(r["slot"]), expert))
        batch = token - prompt + 1 if phase else 0
        assert flags.setdefault((batch, layer, expert), r["residency"] == "1") == (
            r["residency"] == "1"
        )
    rows: list[Row] = [
        (0, token, phase, layer, [e for _, e in sorted(ranked)])
        for (token, phase, layer), ranked in sorted(picks.items())
    ]
    return rows, expert_bytes, flags


def check_curve(shared: Path, run: Run, name: str, every: int) -> None:
    """Every so-manieth budget of a published curve, LRU and Belady."""
    with (shared / "traces" / "bmoe" / f"{name}-curve.csv").open(newline="") as file:
        curve = [row for row in csv.DictReader(file) if row["policy"] in ("lru", "belady")]
    assert len(curve) == 22
    budgets = sorted({int(row["budget_mib"]) for row in curve})[::every]
    for row in (row for row in curve if int(row["budget_mib"]) in budgets):
        policy = "opt" if row["policy"] == "belady" else "lru"
        tally = replay(run, policy, capacity_bytes=int(row["budget_mib"]) * 2**20)
        decode = tally.by_phase["decode"]
        assert f"{100 * tally.total['hits'] / tally.total['lookups']:.3f}" == row["hit_pct_cum"]
        assert f"{100 * decode['hits'] / decode['lookups']:.3f}" == row["hit_pct_decode"]
        assert f"{tally.total['bytes_moved'] / 2**20:.1f}" == row["read_mib"]


@pytest.mark.parametrize(
    ("name", "k", "mib", "hits", "lookups"),
    [("qwen", 6, 4000, 29_597, 39_526), ("gptoss", 2, 3000, 2_066, 6_375)],
)
def test_bmoe_flags(shared: Path, name: str, k: int, mib: int, hits: int, lookups: int) -> None:
    rows, expert_bytes, flags = bmoe(shared / "traces" / "bmoe" / f"{name}.route.csv")
    run = prepare(rows, Shape([sorted(expert_bytes)], 128, k, expert_bytes), "bmoe")
    recorded = replay(run, "lru", capacity_bytes=mib * 2**20)
    assert recorded.flags == flags
    assert (recorded.total["hits"], recorded.total["lookups"]) == (hits, lookups)


@pytest.mark.parametrize(
    ("name", "k", "every"),
    [("gptoss", 2, 2), pytest.param("qwen", 6, 1, marks=pytest.mark.slow)],
)
def test_bmoe_curves(shared: Path, name: str, k: int, every: int) -> None:
    rows, expert_bytes, _ = bmoe(shared / "traces" / "bmoe" / f"{name}.route.csv")
    run = prepare(rows, Shape([sorted(expert_bytes)], 128, k, expert_bytes), "bmoe")
    check_curve(shared, run, name, every)


# ---- the toy ------------------------------------------------------------------------------------


def toy_rows(rnd: Random, stickiness: float) -> list[Row]:
    """One trace of the toy router: 4,000 tokens, 10 of 512 experts, low ids popular."""
    rows: list[Row] = []
    previous: list[int] = []
    for token in range(4000):
        picks: set[int] = set()
        while len(picks) < 10:
            if previous and rnd.random() < stickiness:
                picks.add(rnd.choice(previous))
            else:
                picks.add(min(511, int(rnd.random() ** 1.8 * 512)))
        previous = sorted(picks)
        rows.append((0, token, 1, 0, previous))
    return rows


def test_toy_table(shared: Path) -> None:
    rnd = Random(7)
    for stickiness in ("0.0", "0.4", "0.7"):
        run = prepare(toy_rows(rnd, float(stickiness)), Shape([[0]], 512, 10), "per-pick")
        row = golden(shared, "toy", stickiness=stickiness)[0]
        for policy, column in (("lru", "lru"), ("lfu-decay", "lfu")):
            total = replay(run, policy, [int(row["slots"])]).total
            assert f"{100 * total['hits'] / 40_000:.1f}" == row[f"{column}_hit_pct"]
            assert f"{total['misses'] / 4000:.2f}" == row[f"{column}_misses_per_token"]


# ---- bounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("semantics", ["llama.cpp", "per-pick"])
def test_bounds_are_the_best_possible(semantics: str) -> None:
    """On tiny traces ``opt`` and ``opt-bypass`` reach what trying every choice finds."""
    compared = 0
    for seed in range(150):
        case = small_trace(Random(seed), max_requests=2, max_tokens=4, decode_only=True)
        shape = Shape([case.shape.layers], case.shape.n_expert, case.shape.k)
        run = prepare(case.rows, shape, semantics, concurrency=1 + seed % 2)
        widest = max(len(step.tokens) for step in run.steps)
        smallest = min(widest * shape.k, shape.n_expert) if semantics == "llama.cpp" else 1
        sets = [frozenset((s.layer, e) for e in s.experts) for s in run.sets]
        number = {key: i for i, key in enumerate(sorted(frozenset().union(*sets)))}
        keyed = [frozenset(number[key] for key in members) for members in sets]
        if len(keyed) > 40 or len(number) > 14:
            continue
        for slots in (smallest, smallest + 2):
            best, lowest = fewest_misses(keyed, slots), fewest_misses_bypassing(keyed, slots)
            assert replay(run, "opt", [slots]).total["misses"] == best
            assert replay(run, "opt-bypass", [slots]).total["misses"] == lowest <= best
            compared += 1
    assert compared >= 100
