"""What can be asked of a replay: sizes, budgets, schedules, grids, and the command's bad input."""

from __future__ import annotations

import csv
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from simlab.cli import main
from simlab.errors import UsageError
from simlab.model.budget import NothingCached, slots_for_budget
from simlab.model.layout import ExpertLayout, group_layers
from simlab.policy.registry import load_policy, policy_names
from simlab.replay.cell import Cell
from simlab.replay.grid import cells_for, replay_grid
from simlab.replay.run import Replayer, replay_cell
from simlab.replay.schedule import build_schedule, tokens_of
from simlab.replay.sizes import parse_sizes
from simlab.result.schema import Result
from simlab.result.store import read_results
from simlab.trace.schema import DECODE, PREFILL, Trace, TraceMeta
from simlab.trace.write import write_trace

GATE_UP, DOWN_Q4, DOWN_Q6 = 884_736, 884_736, 1_290_240


def requests(*spans: tuple[int, int]) -> Trace:
    """One layer, four experts, one pick a token; a span is (prompt tokens, decode tokens)."""
    request = np.concatenate([np.full(p + d, i) for i, (p, d) in enumerate(spans)])
    token = np.concatenate([np.arange(p + d) for p, d in spans])
    phase = np.concatenate([[PREFILL] * p + [DECODE] * d for p, d in spans])
    n = len(request)
    return Trace(
        TraceMeta(n_expert=4, k=1, moe_layers=(0,), expert_bytes=((10,),), content_hash="r"),
        request.astype(np.int32),
        token.astype(np.int32),
        phase.astype(np.uint8),
        np.zeros(n, np.int16),
        np.arange(n + 1, dtype=np.int64),
        (np.arange(n) % 4).astype(np.uint16),
    )


def steps(trace: Trace, **options: object) -> list[list[tuple[int, int]]]:
    """The schedule as (request, token) pairs per step."""
    tokens = tokens_of(trace)
    made = build_schedule(trace, tokens, **options)  # type: ignore[arg-type]
    first = tokens.row_start[:-1]
    names = list(zip(trace.request[first].tolist(), trace.token[first].tolist(), strict=True))
    return [
        [names[i] for i in made.token[made.offsets[s] : made.offsets[s + 1]]]
        for s in range(made.n_steps)
    ]


def test_lanes_by_hand() -> None:
    """Two lanes; request 1 has no decode tokens and frees its lane at once."""
    trace = requests((2, 2), (1, 0), (3, 1), (0, 2))
    assert steps(trace, concurrency=2, ubatch=2) == [
        [(0, 0), (0, 1)],  # lane 0 takes request 0 and prefills it
        [(1, 0)],  # lane 1 takes request 1: a prompt only
        [(2, 0), (2, 1)],  # so it takes request 2 as well, in two steps of at most 2 tokens
        [(2, 2)],
        [(0, 2), (2, 3)],  # both decode
        [(0, 3), (3, 0)],  # request 2 has ended: lane 1 took request 3
        [(3, 1)],
    ]


def test_skip_leaves_prompts_out() -> None:
    assert steps(requests((2, 1), (1, 0), (0, 1)), prefill="skip") == [[(0, 2)], [(2, 0)]]
    with pytest.raises(UsageError, match="leave out --prefill skip"):
        steps(requests((2, 0)), prefill="skip")


def test_a_later_turn_is_prefilled_when_its_lane_reaches_it() -> None:
    trace = requests((1, 4))
    trace.phase[2:4] = PREFILL
    assert steps(trace) == [[(0, 0)], [(0, 1)], [(0, 2), (0, 3)], [(0, 4)]]


def test_recorded_steps() -> None:
    trace = requests((0, 3), (0, 2))
    with pytest.raises(UsageError, match="recorded no steps"):
        steps(trace, schedule="recorded")
    recorded = Trace(**{**vars(trace), "step": np.array([0, 1, 2, 1, 2], np.int32)})
    assert steps(trace, ubatch=10**30) == steps(trace)
    assert steps(recorded, schedule="recorded") == [[(0, 0)], [(0, 1), (1, 0)], [(0, 2), (1, 1)]]


def test_sizes() -> None:
    layout = group_layers(512, 10, [0], [])
    slots = [size.slots(layout)[0] for size in parse_sizes("5%,10%,20%,40%,25, 600")]
    assert slots == [[25], [51], [102], [204], [25], [512]]
    assert parse_sizes("600")[0].slots(layout)[1] == [
        "--slots 600 clipped to all 512 keys of group 1"
    ]
    assert parse_sizes("12.5%")[0].share == Fraction(1, 8)
    for wrong in ("0", "-1", "x", "", "1.5", "0%", "-3%", "nan", "nan%", "inf%", "1/0%", "10,,x"):
        with pytest.raises(UsageError):
            [size.slots(layout) for size in parse_sizes(wrong)]
    assert parse_sizes("0.1%")[0].slots(layout)[0] == [1]
    assert "less than one of 512 keys" in parse_sizes("0.1%")[0].slots(layout)[1][0]


def qwen3_30b() -> ExpertLayout:
    """Qwen3-30B-A3B Q4_K_M: down is Q6_K in 24 of 48 layers."""
    six = {*range(6), *range(8, 42, 3), *range(42, 48)}
    assert len(six) == 24
    size = [(GATE_UP, GATE_UP, DOWN_Q6 if layer in six else DOWN_Q4) for layer in range(48)]
    return group_layers(128, 8, range(48), size)


def test_slot_budgets_of_the_articles(shared: Path) -> None:
    flash_next = group_layers(512, 10, range(48), [(2560 * 640 * 18 // 32,) * 3] * 48)
    layouts = {"Qwen3-30B-A3B": qwen3_30b(), "Qwen3.8-Flash-Next": flash_next}
    with open(shared / "golden" / "slot_budget.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    for row in rows:
        layout, mib = layouts[row["model"]], float(row["budget_mib"])
        wanted = [int(n) for n in row["slots_per_group"].split(";")]
        if not any(wanted):
            with pytest.raises(NothingCached, match="caches no group"):
                slots_for_budget(layout, mib)
        else:
            assert slots_for_budget(layout, mib)[0] == wanted, row


def test_a_group_below_k_slots_is_not_cached() -> None:
    layout = group_layers(8, 4, range(3), [(1 << 20,), (1 << 20,), (1 << 22,)])
    slots, warnings = slots_for_budget(layout, 24)
    assert slots[1] == 0 and slots[0] >= 4
    assert "not cached" in warnings[0]


def test_a_group_without_slots_is_streamed_or_served_by_the_cpu() -> None:
    trace = requests((0, 8))
    for on_decline in ("stream", "cpu"):
        counters = replay_cell(trace, slots=[0], on_decline=on_decline).counters
        served = counters.streamed if on_decline == "stream" else counters.cpu_served
        assert served == counters.lookups == 8
        assert counters.bytes_moved == (80 if on_decline == "stream" else 0)


def test_grid_is_single_cells_in_order() -> None:
    rng = np.random.default_rng(1)
    trace = requests((3, 30), (40, 20), (2, 9))
    trace.experts[:] = rng.integers(0, 4, trace.n_rows)
    replayer = Replayer(trace)
    policies = [load_policy(name) for name in ("lru", "lfu-decay", "opt")]
    cells = cells_for(
        replayer, policies, sizes=parse_sizes("1,2,75%"), concurrency=[1, 2],
        params={"half_life": 3.0},
    )  # fmt: skip
    done: list[int] = []
    results = list(replay_grid(replayer, cells, jobs=2, progress=done.append))
    assert [(r.concurrency, r.policy, r.slots) for r in results] == [
        (c, p, (s,)) for c in (1, 2) for p in ("lru", "lfu-decay", "opt") for s in (1, 2, 3)
    ]
    for cell, result in zip(cells, results, strict=True):
        assert result.counters == Replayer(trace).run(cell).counters
    assert sum(done) == sum(len(replayer.access(cell.concurrency).set_step) for cell in cells)
    assert results[3].params == {"half_life": 3.0}
    with pytest.raises(UsageError, match="did you mean half_life"):
        cells_for(replayer, policies[1:2], sizes=parse_sizes("1"), params={"halflife": 1.0})


def test_misses_never_rise_with_slots_on_the_sample(sample: Trace) -> None:
    replayer = Replayer(sample)
    for policy in ("lru", "opt"):
        cells = [Cell(load_policy(policy), (n, n), None, 4) for n in (100, 300, 900, 2000, 3072)]
        misses = [replayer.run(cell).counters.misses for cell in cells]
        assert misses == sorted(misses, reverse=True)


def cached_misses(result: Result) -> int:
    """Misses of steps that passed the gate: what the bounds speak of."""
    return sum(result.by_class[name].misses for name in ("<=8", "9-32"))


def test_every_policy_is_between_the_bounds_on_the_sample(sample: Trace) -> None:
    for lanes in (1, 4):
        replayer = Replayer(sample)
        for slots in (400, 1834):
            cells = {n: Cell(load_policy(n), (slots, slots), None, lanes) for n in policy_names()}
            misses = {name: cached_misses(replayer.run(cell)) for name, cell in cells.items()}
            filling = [name for name in misses if not load_policy(name).declines]
            assert all(misses["opt"] <= misses[name] for name in filling)
            assert min(misses.values()) == misses["opt-bypass"]


def two_groups(seed: int) -> Trace:
    """Two layers of different bytes, three requests."""
    rng = np.random.default_rng(seed)
    n = 120
    picks = np.stack([rng.permutation(6)[:2] for _ in range(2 * n)]).astype(np.uint16)
    return Trace(
        TraceMeta(n_expert=6, k=2, moe_layers=(0, 1), expert_bytes=((2**62,), (1,))),
        np.repeat(np.arange(3, dtype=np.int32), 2 * n // 3),
        np.tile(np.repeat(np.arange(n // 3, dtype=np.int32), 2), 3),
        np.full(2 * n, DECODE, np.uint8),
        np.tile(np.array([0, 1], np.int16), n),
        np.arange(2 * n + 1, dtype=np.int64) * 2,
        picks.reshape(-1),
    )


@pytest.mark.parametrize("lanes", [1, 3])
def test_results_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    """lfu-decay counts on_step calls; a chunk must not swallow or repeat one in either group."""
    wanted = replay_cell(two_groups(5), policy="lfu-decay", slots=[3, 4], concurrency=lanes)
    for chunk in (1, 2, 7):
        monkeypatch.setattr("simlab.replay.pool.CHUNK", chunk)
        found = replay_cell(two_groups(5), policy="lfu-decay", slots=[3, 4], concurrency=lanes)
        assert (found.counters, found.by_layer) == (wanted.counters, wanted.by_layer)


def test_bytes_are_exact_beyond_64_bits() -> None:
    counters = replay_cell(two_groups(1), slots=[2, 2]).counters
    layers = replay_cell(two_groups(1), slots=[2, 2]).by_layer
    assert counters.bytes_moved == sum(
        layer["demand_uploads"] * size for layer, size in zip(layers, (2**62, 1), strict=True)
    )
    assert counters.bytes_moved > 2**64


def test_cycle_counts_distinct_keys_and_the_cliff_follows_the_streams() -> None:
    whole = replay_cell(two_groups(2), slots=[4, 4], concurrency=3)
    per_pick = replay_cell(two_groups(2), slots=[4, 4], concurrency=3, semantics="per-pick")
    assert whole.cycle == per_pick.cycle
    assert whole.cliff_slots == whole.cycle["median"] < 6
    alone = replay_cell(requests((0, 5)), slots=2, concurrency=16)
    assert alone.cliff_slots == replay_cell(requests((0, 5)), slots=2).cliff_slots == 0
    with pytest.raises(UsageError, match="leave out --concurrency"):
        replay_cell(requests((0, 5)), slots=2, concurrency=2, schedule="recorded")


@pytest.fixture(scope="module")
def sample() -> Trace:
    """The shipped sample, its first requests."""
    from simlab.resources import default_trace
    from simlab.trace.edit import slice_trace
    from simlab.trace.read import read_trace

    return slice_trace(read_trace(default_trace()), requests=range(6))


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    path = tmp_path / "trace.parquet"
    write_trace(requests((3, 30), (4, 20)), path)
    return str(path)


def test_json_out_and_table_agree(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in ("json", "parquet"):
        out = tmp_path / f"r.{suffix}"
        asked = ["--policy", "lru,opt", "--slots", "1,50%", "--concurrency", "1,2"]
        assert main(["replay", trace_file, *asked, "--json", "--out", str(out)]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert len(rows) == 8
        stored = [result.to_dict() for result in read_results(out)]
        assert stored == rows
        for row in rows:
            assert row["lookups"] == row["hits"] + row["demand_uploads"] + row["streamed"]
            assert row["provenance"]["command"].startswith("simlab ")
    assert main(["replay", trace_file, "--policy", "lru", "--slots", "2,9"]) == 0
    table = capsys.readouterr().out
    assert "clipped to all 4 keys" in table
    assert "SIMULATED under the llama.cpp semantics" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "lruu"], "did you mean lru?"),
        (["--policy", "./none.py"], "no policy file"),
        (["--slots", "0"], "at least 1 slot"),
        (["--slots", "-5"], "at least 1 slot"),
        (["--slots", "many"], "slots per group (1834) or a share"),
        (["--slots", "10", "--mib", "10"], "not both"),
        (["--mib", "0"], "above 0"),
        (["--mib", "nan"], "above 0"),
        (["--mib", "x"], "--moe-cache-mib takes numbers"),
        (["--n-cpu-moe", "2"], "need --layout"),
        (["--layout", "Qwen3-30B-A3B"], "does not fit the layout: it has 4 experts a layer"),
        (["--layout", "Qwen3-30B"], "did you mean Qwen3-30B-A3B?"),
        (["--semantics", "vllm"], "must be one of llama.cpp, per-pick, bmoe, sglang"),
        (["--concurrency", "0"], "1 or more"),
        (["--concurrency", "two"], "--concurrency takes numbers"),
        (["--prefill", "maybe"], "--prefill must be one of"),
        (["--schedule", "recorded"], "recorded no steps"),
        (["--on-decline", "disk"], "--on-decline must be one of"),
        (["--param", "half_life"], "NAME=VALUE"),
        (["--param", "half_life=x"], "takes one number"),
        (["--param", "half_life=1,2"], "takes one number"),
        (["--slots", "1,,2"], "slots per group"),
        (["--mib", "1e300"], "at most"),
        (["--policy", "\udcff.py"], "not valid UTF-8"),
        (["--param", "half_life=3"], "policy lru has no parameter"),
        (["--ubatch", "0"], "1 or more"),
        (["--seed", "x"], "not a valid integer"),
        (["--seed", "9" * 30], "fit 64 bits"),
        (["--policy", "lfu-decay", "--param", "half_life=inf"], "must be 0.01"),
        (["--jobs", "0"], "--jobs"),
        (["--out", "nowhere/r.json"], "does not exist"),
        (["--out", "r.txt"], ".json or .parquet"),
        (["--slots", "1e1000000000%"], "slots per group"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    trace_file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace_file, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("simlab: error: ")
    assert message in err
