"""The frontier of hits against uploads: against every choice, opt-bypass, and all policies."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_cases import sticky_trace
from strategies import SmallTrace, small_traces

from simlab.analysis.flow import SCALE, Uses, best_of, scaled_costs
from simlab.analysis.frontier import _uses, choose_windows, frontier
from simlab.cli import main
from simlab.errors import UsageError
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.trace.write import write_trace

pytest.importorskip("ortools", reason="the frontier needs OR-tools (the extra `frontier`)")

#: One policy of each kind: filling, declining, bounds.
SOME = ("lru", "lrfu-admit", "opt", "opt-bypass")


def best_by_trying(sets: Sequence[frozenset[int]], slots: int, worth: int, cost: int) -> int:
    """The highest worth x hits - cost x uploads, by trying every cache after every set."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for members in sets:
        following: dict[frozenset[int], int] = {}
        for cache, value in best.items():
            value += worth * len(members & cache)
            union = sorted(cache | members)
            for size in range(min(slots, len(union)) + 1):
                for kept in map(frozenset, combinations(union, size)):
                    left = value - cost * len(kept & (members - cache))
                    following[kept] = max(left, following.get(kept, left))
        best = following
    return max(best.values())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 4), (1000, 1), (3, 2)]),
)
def test_the_flow_is_the_best_of_all_choices(
    sets: list[set[int]], slots: int, prices: tuple[int, int]
) -> None:
    last: dict[int, int] = {}
    time, previous = [], []
    for t, members in enumerate(sets):
        for key in sorted(members):
            previous.append(last.get(key, -1))
            last[key] = len(time)
            time.append(t)
    uses = Uses(np.array(time, np.int64), np.array(previous, np.int64), slots)
    hits, uploads = best_of(uses, *prices)
    wanted = best_by_trying([frozenset(s) for s in sets], slots, *prices)
    assert prices[0] * hits - prices[1] * uploads == wanted


def cell_of(case: SmallTrace, policy: str, concurrency: int = 1) -> Cell:
    sizes = [max(case.shape.k, len(g) * case.shape.n_expert // 2) for g in case.shape.groups]
    return Cell(load_policy(policy), tuple(sizes), None, concurrency)


@settings(max_examples=40, deadline=None)
@given(small_traces(), st.sampled_from(["llama.cpp", "per-pick"]), st.sampled_from([1, 3]))
def test_no_policy_gets_beyond_it_and_opt_bypass_meets_it(
    case: SmallTrace, semantics: str, concurrency: int
) -> None:
    """Several pools, experts of unequal bytes, prompts, the whole run in one window."""
    replayer = Replayer(case.trace, semantics=semantics, on_decline="cpu")
    cells = [cell_of(case, policy, concurrency) for policy in SOME]
    try:
        found = frontier(replayer, cells[0], cells, window_steps=10_000)
    except UsageError as exc:
        assert "no step of the windows passes the gate" in str(exc)
        return
    assert found.whole and found.covered == 1
    sizes = [group.expert_bytes or 1 for group in replayer.layout.groups]
    weights = [size / np.mean(sizes) for size in sizes]
    for cell, point in zip(cells, found.policies, strict=True):
        counters = replayer.run(cell)
        assert point.hits == round((counters.hit_rate or 0) * found.lookups)
        assert sum(point.uploads) == counters.counters.demand_uploads
        assert point.hits <= point.most_hits
        assert point.moved >= point.least_moved
        for best in found.points:
            worth, costs = scaled_costs(best.mu or 0, weights, found.lookups)
            ours, theirs = (
                worth * p.hits - sum(c * n for c, n in zip(costs, p.uploads, strict=True))
                for p in (point, best)
            )
            if best.mu:
                assert ours <= theirs
    most, bypass = found.points[0], found.policies[SOME.index("opt-bypass")]
    assert most.mu == 0 and most.hits == bypass.hits and most.moved <= bypass.moved
    falling = [(p.hits, p.moved) for p in found.points]
    assert falling == sorted(falling, reverse=True)


def test_mu_zero_gives_no_hit_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an upload costs as much as a hit, the first answer has too few hits: asked again."""
    monkeypatch.setattr("simlab.analysis.frontier.SCALE", 1)
    replayer = Replayer(sticky_trace(6), on_decline="cpu")
    cells = [Cell(load_policy(name), (12,)) for name in ("opt-bypass", "opt")]
    (uses,) = _uses(replayer, cells[0])
    found = frontier(replayer, cells[0], cells, mus=[0])
    bypass, opt = found.policies
    assert best_of(uses, 1, 1)[0] < bypass.hits
    assert found.points[0].hits == bypass.hits == bypass.most_hits >= opt.hits
    assert found.points[0].uploads < bypass.uploads
    assert scaled_costs(2, [0.5, 1.5], 9) == (SCALE, [1000, 3000])
    assert scaled_costs(0, [0.5, 1.5], 9) == (15_000, [500, 1500])


def test_windows_are_added_up() -> None:
    replayer = Replayer(sticky_trace(), on_decline="cpu")
    cell = Cell(load_policy("lru"), (12,))
    found = frontier(replayer, cell, [cell], mus=[1], windows=None, window_steps=300)
    assert found.windows == [(0, 300), (300, 300), (600, 300), (900, 60)]
    assert (found.whole, found.covered, found.lookups) == (False, 1.0, 5760)
    parts = [
        frontier(replayer.window(*span), cell, [cell], mus=[1], window_steps=10_000)
        for span in found.windows
    ]
    assert found.points[0].hits == sum(part.points[0].hits for part in parts)
    assert found.policies[0].hits == sum(part.policies[0].hits for part in parts)
    assert found.tokens == sum(part.tokens for part in parts) == 960
    # a window's replay is that of the run's steps, from an empty cache
    row = replayer.window(300, 300).run(cell)
    assert row.schedule == "lanes, 300 steps from step 300 on" and row.counters.tokens == 300
    assert replayer.window(0, 960).run(cell).counters == replayer.run(cell).counters


def test_choose_windows() -> None:
    assert choose_windows(100, 200, 3) == [(0, 100)]
    assert choose_windows(100, 10, 3) == [(0, 10), (45, 10), (90, 10)]
    assert choose_windows(100, 10, 1) == [(0, 10)]
    assert choose_windows(100, 40, 3) == [(0, 40), (40, 40), (80, 20)]
    assert choose_windows(25, 10, None) == [(0, 10), (10, 10), (20, 5)]


def test_jobs_change_nothing() -> None:
    replayer = Replayer(sticky_trace(), on_decline="cpu")
    cell = Cell(load_policy("lru"), (12,))
    one, two = (frontier(replayer, cell, [], mus=[0, 2], jobs=jobs) for jobs in (1, 2))
    assert one.points == two.points


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("frontier") / "sticky.parquet"
    write_trace(sticky_trace(), file)
    return str(file)


def test_the_command(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["frontier", path, "--policy", "lru,lrfu-admit", "--slots", "12,16", "--mu", "0,1,3"]
    assert main([*line, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    one, other = told["cells"]
    assert (one["slots"], other["slots"]) == ([12], [16])
    assert [point["mu"] for point in one["frontier"]] == [0, 1, 3]
    assert [point["policy"] for point in one["policies"]] == ["lru", "lrfu-admit"]
    assert one["whole_run_in_one_window"] and "frontier" in told["provenance"]["command"]
    assert main([*line, "--window-steps", "200"]) == 0
    text = capsys.readouterr().out
    assert "exact in each of 3 windows (62.5% of the run: steps 0-199, 380-579, 760-959)" in text
    assert "frontier, mu = 3" in text and "at most" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--on-decline", "stream"], "the one point of opt-bypass: take --on-decline cpu"),
        (["--semantics", "bmoe", "--slots", "25%"], "not of --semantics bmoe"),
        (["--semantics", "sglang"], "not of --semantics sglang"),
        (["--mu", "-1"], "--mu takes numbers from 0"),
        (["--mu", "nan"], "--mu takes numbers from 0"),
        (["--mu", "x"], "numbers separated by commas"),
        (["--windows", "0"], "--windows must be 1 or more, or all, not 0"),
        (["--windows", "some"], "--windows takes a number or all"),
        (["--window-steps", "0"], "--window-steps must be 1 or more"),
        (["--slots", "1"], "no step of the windows passes the gate"),
        (["--slots", "0"], "at least 1 slot"),
        (["--policy", "lrv"], "did you mean"),
        (["--param", "lift=1"], "policy lru has no parameter 'lift'"),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], words: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["frontier", path, *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1, err


def test_without_or_tools(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    assert main(["frontier", path]) == 2
    err = capsys.readouterr().err
    assert "pip install 'simlab[frontier]'" in err and err.count("\n") == 1
