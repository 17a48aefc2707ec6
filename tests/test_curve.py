"""Curves: every size is the single replay of that size, however it was computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import prepare
from naive import replay as naive_replay
from strategies import SmallTrace, small_trace, small_traces

from simlab.cli import main
from simlab.errors import UsageError
from simlab.policy.loader import Policy
from simlab.policy.registry import load_policy
from simlab.replay.capacity import Capacity
from simlab.replay.cell import Cell
from simlab.replay.curve import MOST_WITH_PARTS, Plan, plan_curve, run_curve
from simlab.replay.curve_approx import run_approx
from simlab.replay.run import Replayer
from simlab.replay.sizes import curve_sizes, even_sizes, parse_sizes
from simlab.result.schema import Result
from simlab.result.store import read_results
from simlab.trace.schema import DECODE, PREFILL, Trace, TraceMeta
from simlab.trace.write import write_trace


@cache
def loaded(name: str) -> Policy:
    """A policy by name; read once, since each look-up hashes its sources."""
    return load_policy(name)


ONE_PASS = {"per-pick": ("lru", "opt"), "llama.cpp": ("opt",)}


def picks(
    layers: int,
    experts: int,
    k: int,
    tokens: int,
    *,
    requests: int = 1,
    prompt: int = 0,
    seed: int = 0,
) -> Trace:
    """Sticky, skewed picks; each request starts with so many prompt tokens."""
    rng = np.random.default_rng(seed)
    weight = 1 / np.arange(1, experts + 1) ** 0.8
    order = np.argsort(rng.random((layers, experts)), axis=1)
    keys = rng.random((tokens * requests, layers, experts)) ** (1 / weight)
    for token in range(1, len(keys)):
        stays = rng.random((layers, experts)) < 0.5
        keys[token][stays] = keys[token - 1][stays]
    ranks = np.argsort(-keys, axis=2)[:, :, :k]
    chosen = np.take_along_axis(order[None].repeat(len(keys), 0), ranks, axis=2)
    rows = tokens * requests * layers
    token_of = np.tile(np.arange(tokens), requests)
    return Trace(
        TraceMeta(
            n_expert=experts,
            k=k,
            moe_layers=tuple(range(layers)),
            expert_bytes=((7,),) * (layers // 2) + ((9,),) * (layers - layers // 2),
            content_hash="curve",
        ),
        np.repeat(np.repeat(np.arange(requests), tokens), layers).astype(np.int32),
        np.repeat(token_of, layers).astype(np.int32),
        np.repeat(np.where(token_of < prompt, PREFILL, DECODE), layers).astype(np.uint8),
        np.tile(np.arange(layers), tokens * requests).astype(np.int16),
        np.arange(rows + 1, dtype=np.int64) * k,
        chosen.reshape(-1).astype(np.uint16),
    )


def plain(row: Result, *, runs: bool = True) -> dict[str, object]:
    """A row without what tells how and when it was made; ``runs``: with its merged runs."""
    told = replace(row, provenance={}, notes=()).to_dict()
    if not runs:
        told = json.loads(json.dumps(told), object_hook=lambda d: {**d, "merged_runs": None})
    return told


def assert_is_replayed(replayer: Replayer, cells: Sequence[Cell], *, jobs: int = 1) -> Plan:
    """Every row of the curve is the row of the cell's own replay, to the last counter."""
    plan = plan_curve(replayer, cells)
    rows = run_curve(replayer, cells, plan, jobs=jobs)
    assert len(rows) == len(cells)
    in_pass = {i for alike in plan.passes for i in alike}
    for i, (cell, row) in enumerate(zip(cells, rows, strict=True)):
        one_pass = i in in_pass
        assert row.provenance["path"].startswith("one pass" if one_pass else "a replay")
        runs = not one_pass or replayer.semantics == "per-pick"
        if not runs:
            assert row.counters.merged_runs is None
        assert plain(row, runs=runs) == plain(replayer.run(cell), runs=runs), cell.slots
    return plan


def all_sizes(replayer: Replayer) -> list[tuple[int, ...]]:
    """Every size of the largest pool, the others as far as they go."""
    keys = [replayer.layout.keys_of(i) for i in range(len(replayer.layout.groups))]
    return [tuple(min(n, most) for most in keys) for n in range(1, max(keys) + 1)]


@pytest.mark.parametrize("semantics", ["per-pick", "llama.cpp"])
@pytest.mark.parametrize("concurrency", [1, 5])
def test_every_size_is_its_single_replay(semantics: str, concurrency: int) -> None:
    """64 sizes a policy, two groups, prompts on the large path, and a gate that parts the sizes."""
    trace = picks(8, 16, 2, 60, requests=7, prompt=34)
    replayer = Replayer(trace, semantics=semantics, on_decline="cpu")
    sizes = all_sizes(replayer)
    assert len(sizes) == 64
    policies = [loaded(name) for name in ("lru", "opt", "opt-bypass", "clock")]
    cells = [Cell(policy, n, None, concurrency) for policy in policies for n in sizes]
    plan = assert_is_replayed(replayer, cells, jobs=2)
    passes = {cells[i].policy.name for alike in plan.passes for i in alike}
    assert passes == set(ONE_PASS[semantics])


@settings(max_examples=40, deadline=None)
@given(small_traces(), st.randoms(use_true_random=False))
def test_passes_are_single_replays(case: SmallTrace, rnd: Random) -> None:
    """Ragged traces: rows short of k, absent rows, several turns, any engine option."""
    semantics = rnd.choice(list(ONE_PASS))
    schedule = rnd.choice(["lanes", "lanes", "recorded"])
    prefill = "engine" if all(row[2] == 0 for row in case.rows) else rnd.choice(["engine", "skip"])
    replayer = Replayer(
        case.trace,
        semantics=semantics,
        schedule=schedule,
        prefill=prefill,
        ubatch=rnd.choice([512, 4]),
        draft=rnd.choice([0, 0, 2]) if schedule == "lanes" else 0,
        on_decline=rnd.choice(["stream", "cpu"]),
    )
    lanes = 1 if schedule == "recorded" else rnd.choice([1, 2, 3, 12])
    sizes = all_sizes(replayer)
    rnd.shuffle(sizes)
    policies = [loaded(name) for name in ONE_PASS[semantics]]
    assert_is_replayed(replayer, [Cell(p, n, None, lanes) for p in policies for n in sizes])


@pytest.mark.parametrize("semantics", list(ONE_PASS))
def test_passes_are_the_naive_twin(semantics: str) -> None:
    """Hits of every size, counted by the slow twin's own pools."""
    for seed in range(25):
        rnd = Random(seed)
        case, lanes = small_trace(rnd), rnd.choice([1, 2, 12])
        replayer = Replayer(case.trace, semantics=semantics)
        run = prepare(case.rows, case.shape, semantics, lanes)
        sizes = all_sizes(replayer)
        for name in ONE_PASS[semantics]:
            cells = [Cell(loaded(name), n, None, lanes) for n in sizes]
            rows = run_curve(replayer, cells, plan_curve(replayer, cells))
            for row, slots in zip(rows, sizes, strict=True):
                wanted = naive_replay(run, name, slots).total
                found = asdict(row.counters)
                for what in ("hits", "demand_uploads", "streamed", "bytes_moved", "pick_hits"):
                    assert found[what] == wanted[what], (name, slots, what)


def test_long_and_large() -> None:
    """Timelines that are compacted, groups of more than 128 slots, calls in several chunks."""
    trace = picks(20, 128, 4, 2000)
    assert trace.n_picks > 2 * 65_536
    for semantics, names in ONE_PASS.items():
        replayer = Replayer(trace, semantics=semantics)
        sizes = [(n, n) for n in (4, 9, 300, 600, 601, 1100, 1280)]
        assert_is_replayed(replayer, [Cell(loaded(p), n) for p in names for n in sizes])


def test_what_has_no_pass_is_replayed_and_says_why(tmp_path: Path) -> None:
    trace = picks(2, 8, 2, 30)
    lru, opt = loaded("lru"), loaded("opt")
    sizes = [(n, n) for n in range(2, 9)]
    mine = tmp_path / "lru.py"
    mine.write_text(lru.path.read_text().replace("Least", "Not the least"))
    own = loaded(str(mine))
    assert own.hash != lru.hash
    for policy, options, why in (
        (lru, {}, "no stack algorithm under llama.cpp"),
        (opt, {"semantics": "sglang"}, "no pass for sglang"),
        (opt, {"pin": 1}, "beside --pin or --capacity"),
        (opt, {"capacity": Capacity((3,), (parse_sizes("50%")[0].share or 0,))}, "--capacity"),
        (own, {"semantics": "per-pick"}, "a replay a size"),
    ):
        replayer = Replayer(trace, **options)  # type: ignore[arg-type]
        plan = assert_is_replayed(replayer, [Cell(policy, n) for n in sizes])
        assert plan.passes == []
        assert why in plan.line()


def test_sizes_that_part_the_steps_otherwise_have_passes_of_their_own() -> None:
    """Three lanes, then the last two requests: steps that need 6 and 4 slots."""
    trace = picks(4, 8, 2, 20, requests=5)
    replayer = Replayer(trace)
    cells = [Cell(loaded("opt"), (n, n), None, 3) for n in range(1, 17)]
    plan = assert_is_replayed(replayer, cells)
    assert [len(alike) for alike in plan.passes] == [3, 11]
    assert plan.line() == "opt@1: one pass for 14 sizes, a replay each for 2 whose gate differs"


def test_many_rows_go_without_parts() -> None:
    trace = picks(2, 600, 2, 20)
    replayer = Replayer(trace, semantics="per-pick")
    cells = [Cell(loaded("lru"), (n, 1)) for n in range(1, 601)]
    cells += [Cell(loaded("lru"), (n, 2)) for n in range(1, 601)]
    assert len(cells) > MOST_WITH_PARTS
    rows = run_curve(replayer, cells, plan_curve(replayer, cells))
    whole = replayer.run(cells[77])
    assert rows[77].by_layer == rows[77].by_request == rows[77].windows == []
    assert "without their parts" in rows[77].notes[-1]
    assert rows[77].counters == whole.counters
    assert rows[77].by_class == whole.by_class


def approximated(trace: Trace, names: Sequence[str], sizes: int) -> tuple[Replayer, list[Cell]]:
    replayer = Replayer(trace)
    slots = [tuple(size.slots(replayer.layout)[0]) for size in even_sizes(sizes)]
    return replayer, [Cell(loaded(name), n) for name in names for n in slots]


def test_approx_tells_its_error() -> None:
    replayer, cells = approximated(picks(8, 32, 2, 400), ("lru", "opt", "clock"), 64)
    exact = run_curve(replayer, cells, plan_curve(replayer, cells))
    rows, told = run_approx(replayer, cells, plan_curve(replayer, cells))
    paths = [row.provenance["path"].split()[0] for row in rows]
    assert {"one", "a", "interpolated"} == set(paths)
    for name, line in zip(("lru", "clock"), told, strict=True):
        assert line.startswith(f"APPROXIMATE: {name}@1, C = 1: ")
        error = float(line.split("held-out sizes: ")[1].split(" points")[0])
        guessed = [i for i, path in enumerate(paths) if path == "interpolated"]
        off = [
            100 * abs((rows[i].hit_rate or 0) - (exact[i].hit_rate or 0))
            for i in guessed
            if rows[i].policy == name
        ]
        assert 20 < len(off) < 50
        # held-out sizes speak for the others: straight lines through 16 points are this good
        assert 0 < error < 3
        assert max(off) < 4
    for row, true, path in zip(rows, exact, paths, strict=True):
        row.counters.check("a row")
        assert row.slots == true.slots
        assert row.capacity_bytes == true.capacity_bytes
        if path == "interpolated":
            assert any("APPROXIMATE" in note for note in row.notes)
        else:
            assert plain(row) == plain(true)


def test_approx_measures_where_it_did_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that jumps at one size only: the error told is the jump when that size is held out."""
    from simlab.replay import curve_approx

    replayer, cells = approximated(picks(4, 32, 2, 200), ("lru",), 32)
    plan = plan_curve(replayer, cells)
    target = plan.single[len(plan.single) // 2]
    real = curve_approx.run_curve

    def spoilt(replayer: Replayer, cells_: Sequence[Cell], *args: object, **more: object) -> object:
        rows = real(replayer, cells_, *args, **more)  # type: ignore[arg-type]
        return [
            replace(row, hit_rate=0.0) if row.slots == cells[target].slots else row for row in rows
        ]

    monkeypatch.setattr(curve_approx, "run_curve", spoilt)
    monkeypatch.setattr(curve_approx, "_held_out", lambda seed, indices: [target])
    rows, told = run_approx(replayer, cells, plan)
    true = replayer.run(cells[target]).hit_rate
    assert true is not None
    error = float(told[0].split("held-out sizes: ")[1].split(" points")[0]) / 100
    assert error == pytest.approx(true, abs=0.05)
    assert rows[target].hit_rate == 0.0


def test_approx_needs_sizes() -> None:
    replayer, cells = approximated(picks(2, 8, 2, 30), ("lru",), 12)
    with pytest.raises(UsageError, match="at least 16 sizes"):
        run_approx(replayer, cells, plan_curve(replayer, cells))


def test_sizes_as_typed() -> None:
    def texts(text: str) -> list[str]:
        return [size.text for size in parse_sizes(text)]

    assert texts("64-200:64,5%-7%,3") == ["64", "128", "192", "5%", "6%", "7%", "3"]
    assert texts("4-7") == ["4", "5", "6", "7"]
    assert texts("10%-12%:0.5%") == ["10%", "10.5%", "11%", "11.5%", "12%"]
    assert [size.text for size in even_sizes(4)] == ["25%", "50%", "75%", "100%"]
    assert len(curve_sizes()) >= 50
    assert {"1", "1%", "10%", "25%", "50%", "100%"} <= {size.text for size in curve_sizes()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("curve") / "picks.parquet"
    write_trace(picks(8, 16, 2, 60, requests=4), path)
    return str(path)


@pytest.mark.parametrize("semantics", list(ONE_PASS))
def test_the_command_equals_simlab_replay(
    file: str, semantics: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 60 sizes, counter for counter, out of the result file."""
    options = [file, "--policy", "lru,opt,clock", "--semantics", semantics, "--concurrency", "1,3"]
    assert main(["curve", *options, "--slots", "5-64", "--out", str(tmp_path / "c.parquet")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("clock@1: a replay a size" in line and "opt@1" in line for line in lines)
    sizes = ",".join(map(str, range(5, 65)))
    assert main(["replay", *options, "--slots", sizes, "--out", str(tmp_path / "r.json")]) == 0
    curve, single = read_results(tmp_path / "c.parquet"), read_results(tmp_path / "r.json")
    assert len(curve) == len(single) == 2 * 3 * 60
    for row, wanted in zip(curve, single, strict=True):
        runs = row.counters.merged_runs is not None
        assert runs or (row.policy, semantics) == ("opt", "llama.cpp")
        assert plain(row, runs=runs) == plain(wanted, runs=runs)


def test_the_command_prints_json_and_is_drawn(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "c.json")
    assert main(["curve", file, "--policy", "lru,opt", "--approx", "--json", "--out", out]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert [row["policy"] for row in rows[:: len(rows) // 2]] == ["lru", "opt"]
    assert "APPROXIMATE: lru@1" in printed.err
    assert len({tuple(row["slots_json"]) for row in rows}) == len(rows) // 2
    assert main(["report", out, "--out", str(tmp_path / "c.html")]) == 0
    assert "APPROXIMATE" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slots", "0"], "at least 1 slot"),
        (["--slots", "-4"], "at least 1 slot"),
        (["--slots", "some"], "not 'some'"),
        (["--slots", "9-4"], "ends before it begins"),
        (["--slots", "5%-9"], "of slots or of shares"),
        (["--slots", "1-5:0"], "at least 1 slot"),
        (["--slots", "1-999999999999"], "more than 8,192 sizes"),
        (["--sizes", "0"], "1 to 8,192 sizes, not 0"),
        (["--sizes", "-3"], "1 to 8,192 sizes, not -3"),
        (["--sizes", "x"], "'x' is not a valid integer"),
        (["--sizes", "100000"], "1 to 8,192 sizes, not 100000"),
        (["--sizes", "5", "--slots", "4"], "give one of --slots, --sizes"),
        (["--sizes", "8", "--approx"], "at least 16 sizes"),
        (["--policy", "nope"], "no policy 'nope'"),
        (["--param", "x=1"], "no parameter 'x'"),
        (["--semantics", "bmoe", "--slots", "4"], "in bytes"),
        (["--concurrency", "0"], "must be 1 or more"),
        (["--out", "curve.csv"], ".json or .parquet"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(
    file: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["curve", file, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("simlab: error: ")
    assert err.count("\n") == 1
