"""``simlab tune``: the split, the search, what is reported, and bad input."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab_cases import sticky_trace

from simlab.analysis.metrics import METRICS, metric_of
from simlab.analysis.search import Score, Values, coarse_values, search, space_of
from simlab.analysis.split import split_trace
from simlab.analysis.tune import Tuned, Tuner
from simlab.cli import main
from simlab.cost.model import Costs, work_of
from simlab.errors import UsageError
from simlab.policy.protocol import Param
from simlab.policy.registry import load_policy, policy_names
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer, replay_cell
from simlab.result.store import read_results
from simlab.trace.edit import slice_trace
from simlab.trace.hash import content_hash
from simlab.trace.schema import Trace
from simlab.trace.write import write_trace


def picks_by_token(trace: Trace) -> dict[tuple[int, int, int], list[int]]:
    return {
        (int(trace.request[r]), int(trace.token[r]), int(trace.layer[r])): trace.experts[
            trace.offsets[r] : trace.offsets[r + 1]
        ].tolist()
        for r in range(trace.n_rows)
    }


@pytest.mark.parametrize("how", ["first-half", "random", "tokens"])
def test_a_split_loses_nothing(how: str) -> None:
    trace = sticky_trace(7, 20)
    parts = split_trace(trace, how, seed=3)
    one, other = picks_by_token(parts.tuning), picks_by_token(parts.held_out)
    assert not one.keys() & other.keys()
    assert {**one, **other} == picks_by_token(trace)
    requests = [{r for r, _, _ in part} for part in (one, other)]
    if how == "tokens":
        assert requests[0] == requests[1] == set(range(7))
        assert max(t for _, t, _ in one) == 9 and min(t for _, t, _ in other) == 10
    else:
        assert not requests[0] & requests[1] and len(requests[0]) == 3
        assert (requests[0] == {0, 1, 2}) == (how == "first-half")
    assert parts.tuning.meta.content_hash == content_hash(parts.tuning)
    assert parts.tuning.meta.tags.keys() <= trace.meta.tags.keys()


def test_a_random_split_is_drawn_with_the_seed() -> None:
    trace = sticky_trace(12, 12)
    hashes = [split_trace(trace, "random", seed).tuning.meta.content_hash for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_single_request_is_cut_in_its_tokens() -> None:
    parts = split_trace(sticky_trace(1, 80))
    assert "the single request's tokens" in parts.tuned_on
    assert (parts.tuning.token.max(), parts.held_out.token.min()) == (39, 40)


def test_too_little_to_tune_on() -> None:
    with pytest.raises(UsageError, match="too few requests to tune on: a half holds 20 tokens"):
        split_trace(sticky_trace(4, 10))
    with pytest.raises(UsageError, match="a half would be empty"):
        split_trace(sticky_trace(1, 1))
    with pytest.raises(UsageError, match="--split must be one of"):
        split_trace(sticky_trace(4, 10), "last-half")


# ---- search ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policy_names())
def test_what_is_tried_of_a_policy_is_allowed(name: str) -> None:
    for param_name, param in load_policy(name).params.items():
        grid = coarse_values(param)
        assert param.default in grid and len(grid) >= 3
        for value in grid:
            load_policy(name).values({param_name: value})
            assert not isinstance(param.default, int) or value == int(value)


def test_coarse_values_by_hand() -> None:
    assert coarse_values(Param(16.0, low=0.01)) == [1, 4, 16, 64, 256]
    assert coarse_values(Param(0.1, low=-100, high=0.3)) == [0, 0.00625, 0.025, 0.1, 0.3]
    assert coarse_values(Param(0.5, low=0, high=1)) == [0.02, 0.1, 0.3, 0.5, 0.6, 0.9]
    assert coarse_values(Param(2, low=1, high=16)) == [1, 2, 8, 16]
    assert coarse_values(Param(0, low=0, high=65)) == [0, 1, 4, 16, 64, 65]


def bowl(points: Sequence[Values]) -> list[Score]:
    """Least at half_life 40 and margin 0.3."""
    return [(0.0, np.log(p["half_life"] / 40) ** 2 + (p["margin"] - 0.3) ** 2) for p in points]


def test_the_search_comes_near_the_least_value_within_its_budget() -> None:
    calls: list[int] = []

    def evaluate(points: Sequence[Values]) -> list[Score]:
        calls.append(len(points))
        return bowl(points)

    space = space_of(load_policy("lrfu-admit"), {}, {})
    found = search(space, evaluate, budget=80)
    best, score = found[0]
    assert sum(calls) == len(found) <= 80
    assert calls[0] == 1  # the defaults by themselves, first
    assert 34 < best["half_life"] < 47 and abs(best["margin"] - 0.3) < 0.06
    assert score == min(s for _, s in found)
    assert len({tuple(v.items()) for v, _ in found}) == len(found)
    fewer = search(space, bowl, budget=10)
    assert len(fewer) == 10 and fewer[0][1] >= score


def test_the_search_is_the_same_for_a_seed() -> None:
    space = space_of(load_policy("lrfu-admit"), {}, {})
    runs = [[v for v, _ in search(space, bowl, budget=12, seed=s)] for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_equal_scores_leave_the_defaults() -> None:
    space = space_of(load_policy("lrfu-admit"), {}, {})
    found = search(space, lambda points: [(0.0, 1.0)] * len(points), budget=30)
    assert found[0][0] == load_policy("lrfu-admit").values()


def test_listed_and_fixed_values_are_kept() -> None:
    space = space_of(load_policy("lrfu-admit"), {"margin": 0.7}, {"half_life": [4, 8, 100]})
    found = search(space, bowl, budget=50)
    assert sorted((v["half_life"], v["margin"]) for v, _ in found) == [
        (4, 0.7), (8, 0.7), (100, 0.7),
    ]  # fmt: skip
    assert found[0][0]["half_life"] == 100


def test_whole_numbers_stay_whole() -> None:
    space = space_of(load_policy("lru-k"), {}, {})
    found = search(space, lambda ps: [(0.0, abs(p["k"] - 5)) for p in ps], budget=30)
    assert found[0][0] == {"k": 5}
    assert all(values["k"] == int(values["k"]) for values, _ in found)


# ---- tuning ---------------------------------------------------------------------------------


def tuner(
    policy: str, metric: str = "hit_rate", stickiness: float = 0.7, **options: object
) -> Tuner:
    parts = split_trace(sticky_trace(stickiness=stickiness))
    replayers = [Replayer(part, on_decline="cpu") for part in (parts.tuning, parts.held_out)]
    costs = Costs(20.0, 10.0, step_ms=0.1)
    given = {"budget": 25, "resamples": 500, **options}
    space = space_of(load_policy(policy), {}, {})
    return Tuner(*replayers, space, metric_of(metric, costs, 30.0), **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return tuner("lrfu").tune(Cell(load_policy("lrfu"), (12,)))


def test_what_is_reported_is_what_replays_give(tuned: Tuned) -> None:
    parts = split_trace(sticky_trace())

    def rate(policy: str, part: Trace, params: dict[str, float]) -> float | None:
        return replay_cell(part, policy=policy, slots=12, params=params, on_decline="cpu").hit_rate

    assert tuned.tuned == pytest.approx(
        {
            "default": rate("lrfu", parts.tuning, {}),
            "tuned": rate("lrfu", parts.tuning, tuned.params),
            "lru": rate("lru", parts.tuning, {}),
            "opt": rate("opt", parts.tuning, {}),
        }
    )
    assert [figures.label for figures in tuned.held_out] == ["default", "tuned", "lru", "opt"]
    for figures in tuned.held_out:
        params = dict(figures.params) if figures.row.policy == "lrfu" else {}
        assert figures.hit_rate.estimate == pytest.approx(
            rate(figures.row.policy, parts.held_out, params)
        )
        assert figures.hit_rate.low < figures.hit_rate.estimate < figures.hit_rate.high
    default, best, lru, opt = (figures.row.counters.misses for figures in tuned.held_out)
    closed = [figures.gap_closed.estimate for figures in tuned.held_out]
    assert closed == pytest.approx([(lru - m) / (lru - opt) for m in (default, best, lru, opt)])
    assert tuned.tuned["tuned"] == max(rate for _, _, rate in tuned.search)
    assert tuned.tried == len(tuned.search) <= 25


def test_jobs_change_nothing(tuned: Tuned) -> None:
    again = tuner("lrfu", jobs=2).tune(Cell(load_policy("lrfu"), (12,)))
    assert again.to_dict()["search"] == tuned.to_dict()["search"]
    assert again.gain == tuned.gain


def test_bytes_are_saved_at_lru_s_hit_rate() -> None:
    cell = Cell(load_policy("lrfu-admit"), (16,))
    free = tuner("lrfu-admit", "bytes_moved", 0.2).tune(cell)
    kept = tuner("lrfu-admit", "bytes_moved", 0.2, floor="lru").tune(cell)
    # without a floor hits are given away for bytes
    assert free.tuned["tuned"] < kept.tuned["tuned"] < kept.tuned["lru"]
    assert free.floor is None
    parts = split_trace(sticky_trace(stickiness=0.2))
    rates = [
        replay_cell(parts.tuning, policy=p, slots=16, params=v, on_decline="cpu").hit_rate
        for p, v in (("lrfu-admit", kept.params), ("lru", {}), ("lrfu-admit", free.params))
    ]
    assert rates[0] > rates[1] > rates[2]
    assert kept.reached and kept.floor == rates[1]
    figures = {f.label: f for f in kept.held_out}
    assert list(figures) == ["default", "tuned", "lru", "opt", "opt-bypass"]
    moved = {name: f.row.counters.bytes_moved for name, f in figures.items()}
    assert kept.bytes_ratio.estimate == pytest.approx(moved["lru"] / moved["tuned"])
    assert kept.kept.estimate == pytest.approx(
        figures["tuned"].row.hit_rate - figures["lru"].row.hit_rate
    )


def test_a_floor_that_nothing_reaches_is_said() -> None:
    cell = Cell(load_policy("lrfu-admit"), (12,))
    found = tuner("lrfu-admit", "bytes_moved", floor=0.99).tune(cell)
    assert not found.reached
    assert "no values reach a hit rate of 99.00%" in found.warnings[0]


def test_what_the_held_out_half_does_not_confirm_is_said() -> None:
    """Only a value that is worse than the default may be tried."""
    parts = split_trace(sticky_trace(1, 400))
    both = (Replayer(parts.tuning), Replayer(parts.held_out))
    space = space_of(load_policy("lrfu"), {}, {"half_life": [1e6]})
    found = Tuner(*both, space, metric_of("hit_rate")).tune(Cell(load_policy("lrfu"), (12,)))
    default, tuned, *_ = found.held_out
    assert found.params == {"half_life": 1e6}
    assert found.gain.estimate == tuned.row.hit_rate - default.row.hit_rate < 0
    assert any(w.startswith("NOT CONFIRMED: on the held-out part") for w in found.warnings)
    assert any("1 held-out request: too few for intervals" in w for w in found.warnings)


def test_milliseconds_are_those_of_the_time_model() -> None:
    """Uploads only: the metric is Costs.ms_per_token of the row."""
    found = tuner("lrfu", "ms").tune(Cell(load_policy("lrfu"), (12,)))
    replayer = Replayer(split_trace(sticky_trace()).held_out, on_decline="cpu")
    for figures in found.held_out:
        work = work_of(figures.row, replayer.layout)
        wanted = Costs(20.0, 10.0, step_ms=0.1).ms_per_token(work)
        assert figures.metric.estimate == pytest.approx(wanted)
    assert set(METRICS) == {"hit_rate", "bytes_moved", "ms"}


# ---- command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("tune") / "sticky.parquet"
    write_trace(sticky_trace(), file)
    return str(file)


def test_the_command(path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "held-out.json"
    line = ["tune", path, "--policy", "lrfu-admit", "--metric", "bytes_moved", "--on-decline"]
    line += ["cpu", "--slots", "12,50%", "--budget", "12", "--resamples", "200"]
    assert main([*line, "--json", "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tuned_on"] == "12 of 24 requests (the first in trace order)"
    assert [cell["slots"] for cell in told["cells"]] == [[12], [24]]
    assert told["cells"][0]["hit_rate_floor"] is not None  # LRU's, for a policy that declines
    rows = read_results(out)
    assert [r.policy for r in rows[:5]] == ["lrfu-admit", "lrfu-admit", "lru", "opt", "opt-bypass"]
    assert "the other 12" in rows[0].trace_name
    assert main(line) == 0
    text = capsys.readouterr().out
    assert "hit rate to keep" in text and "LRU moves" in text and "opt-bypass (bound)" in text
    # the line to type is one that works, with the values found
    typed = next(x for x in text.splitlines() if x.strip().startswith("simlab replay"))
    assert main([*shlex.split(typed)[1:], "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["params_json"] == pytest.approx(told["cells"][0]["params"])
    assert (row["slots_json"], row["on_decline"]) == ([12], "cpu")
    typed = [x for x in text.splitlines() if x.strip().startswith("simlab replay")][1]
    assert "--slots 50%" in typed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policy", "lru"], "lru has no parameter to tune"),
        (["--policy", "lrfu", "--param", "half_life=3"], "nothing is left to tune"),
        (["--policy", "lrfu", "--try", "half_lief=3"], "did you mean half_life"),
        (["--policy", "lrfu", "--try", "half_life=3,x"], "numbers separated by commas"),
        (["--policy", "lrfu", "--try", "half_life=-1"], "must be 0.01..1e+09, not -1"),
        (["--policy", "lrfu", "--try", "half_life=nan"], "must be 0.01..1e+09, not nan"),
        (["--policy", "lrfu", "--try", "half_life"], "--try takes NAME=V,V"),
        (["--policy", "lrfu", "--try", "half_life=1", "--try", "half_life=2"], "given twice"),
        (["--policy", "lrfu-admit", "--param", "margin=1", "--try", "margin=2"], "not both"),
        (["--policy", "lrfu", "--param", "margin=1"], "has no parameter 'margin'"),
        (["--policy", "lrfv"], "did you mean lrfu"),
        (["--policy", "lrfu", "--metric", "speed"], "--metric must be one of"),
        (["--policy", "lrfu", "--at-least-hit-rate", "70"], "--at-least-hit-rate takes lru"),
        (["--policy", "lrfu", "--budget", "1"], "--budget must be 2"),
        (["--policy", "lrfu", "--split", "half"], "--split must be one of"),
        (["--policy", "lrfu", "--slots", "-1"], "at least 1 slot"),
        (["--policy", "lrfu", "--metric", "ms", "--link", "fast"], "--link takes"),
        (["--policy", "lrfu", "--metric", "ms", "--cpu", "fast"], "--cpu takes"),
        (["--policy", "lrfu", "--metric", "ms", "--step-ms", "-1"], "--step-ms must be"),
        ([], "Missing option '--policy'"),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], words: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", path, *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1, err


def test_too_few_requests_and_unknown_bytes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, unknown = str(tmp_path / "short.parquet"), str(tmp_path / "unknown.parquet")
    trace = sticky_trace()
    write_trace(slice_trace(trace, requests=[0, 1], tokens=range(20)), short)
    write_trace(replace(trace, meta=trace.meta.with_(expert_bytes=())), unknown)
    assert main(["tune", short, "--policy", "lrfu"]) == 2
    assert "too few requests to tune on" in capsys.readouterr().err
    assert main(["tune", unknown, "--policy", "lrfu", "--metric", "bytes_moved"]) == 2
    assert "--expert-bytes" in capsys.readouterr().err
