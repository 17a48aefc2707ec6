"""Intervals over requests: the bootstrap against a loop, and the counters that it draws from."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from naive import on_cached_path, prepare
from naive import replay as naive_replay
from strategies import small_trace, small_traces

from simlab.analysis.bootstrap import FEWEST, Draws, Interval, resampled_sums
from simlab.analysis.metrics import columns_of
from simlab.errors import UsageError
from simlab.policy.registry import load_policy
from simlab.replay.by_request import by_request
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer


def test_resampled_sums_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(1)
    table = rng.integers(0, 100, (7, 3)).astype(float)
    found = resampled_sums(table, 200, seed=5)
    again = np.random.default_rng(5)
    for drawn in found:
        times = again.multinomial(7, np.full(7, 1 / 7))
        assert times.sum() == 7
        wanted = [sum(times[i] * table[i][c] for i in range(7)) for c in range(3)]
        assert drawn.tolist() == wanted


def test_pieces_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.arange(20.0).reshape(10, 2)
    whole = resampled_sums(table, 300, seed=3)
    monkeypatch.setattr("simlab.analysis.bootstrap._CELLS_AT_ONCE", 70)
    assert (resampled_sums(table, 300, seed=3) == whole).all()


def test_an_interval_by_hand() -> None:
    """Five equal requests: every draw gives the same. One odd request: the middle 95 % hold it."""
    equal = Draws({"hits": np.full(5, 3.0), "lookups": np.full(5, 4.0)})
    assert equal.ratio("hits", "lookups") == Interval(0.75, 0.75, 0.75, 5)
    odd = Draws({"hits": np.array([4.0, 0, 0, 0, 0]), "lookups": np.full(5, 4.0)}, seed=2)
    found = odd.ratio("hits", "lookups")
    # the odd one is drawn 0 to 3 times in the middle 95 % of draws (binomial, 5 and 1/5)
    assert (found.estimate, found.low, found.high) == (0.2, 0.0, 0.6)
    assert found.sign == 0 and equal.ratio("hits", "lookups").sign == 1


def test_gap_closed() -> None:
    columns = {
        "p": np.array([8.0, 4, 6, 6, 6]),
        "lru": np.full(5, 10.0),
        "opt": np.full(5, 2.0),
    }
    draws = Draws(columns)
    found = draws.gap_closed("p", "lru", "opt")
    assert found.estimate == (50 - 30) / (50 - 10)
    assert found.low is not None and found.high is not None
    assert found.low < found.estimate < found.high
    assert draws.gap_closed("opt", "lru", "opt").low == 1
    assert draws.gap_closed("lru", "lru", "opt").high == 0
    nothing = draws.gap_closed("p", "lru", "lru")  # no gap to close
    assert (nothing.estimate, nothing.low) == (None, None)


def test_few_requests_have_no_interval() -> None:
    found = Draws({"a": np.ones(FEWEST - 1), "b": np.ones(FEWEST - 1)}).ratio("a", "b")
    assert found == Interval(1.0, None, None, FEWEST - 1)
    assert found.sign == 0


def test_a_95_percent_interval_holds_the_truth_in_about_95_percent_of_samples() -> None:
    """Requests of very unequal length, as real ones: the rate of the whole population is known."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(10, 500, 20_000).astype(float)
    hits = rng.beta(8, 4, 20_000) * lengths
    truth = hits.sum() / lengths.sum()
    inside = 0
    for trial in range(300):
        chosen = rng.integers(0, 20_000, 60)
        draws = Draws({"h": hits[chosen], "n": lengths[chosen]}, resamples=1000, seed=trial)
        found = draws.ratio("h", "n")
        assert found.low is not None and found.high is not None
        inside += found.low <= truth <= found.high
    assert 0.89 <= inside / 300 <= 0.98


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resamples": 99}, "--resamples must be 100"),
        ({"confidence": 1.0}, "--confidence must be between"),
        ({"confidence": float("nan")}, "--confidence must be between"),
    ],
)
def test_bad_options(options: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Draws({"a": np.ones(9)}, **options)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(small_traces())
def test_lookups_are_shared_as_a_loop_shares_them(case) -> None:
    """LRU under llama.cpp's rules, at C = 1 and 3, in exact fractions."""
    for concurrency in (1, 3):
        sizes = [max(1, len(g) * case.shape.n_expert // 2) for g in case.shape.groups]
        replayer = Replayer(case.trace)
        cell = Cell(load_policy("lru"), tuple(sizes), None, concurrency)
        table = by_request(replayer, replayer.outcomes(cell))
        run = prepare(case.rows, case.shape, concurrency=concurrency)
        flags = naive_replay(run, "lru", sizes).flags
        slots = {x: n for g, n in zip(case.shape.groups, sizes, strict=True) for x in g}
        wanted: dict[int, dict[str, Fraction]] = defaultdict(lambda: defaultdict(Fraction))
        decodes = any(not step.prefill for step in run.steps)
        for step in run.steps:
            for request, _ in step.tokens:
                if not (decodes and step.prefill):
                    wanted[request]["tokens"] += 1
                    wanted[request]["steps"] += Fraction(1, len(step.tokens))
                wanted[request]["lookups"] += 0
        for s in run.sets:
            asked = Counter(expert for _, expert in s.picks)
            step = run.steps[s.step]
            for request, expert in s.picks:
                part, hit = Fraction(1, asked[expert]), flags[s.step, s.layer, expert]
                mine = wanted[request]
                if on_cached_path(run, slots[s.layer], len(step.tokens)):
                    mine["lookups"] += part
                    mine["hits"] += part * hit
                if not (decodes and step.prefill):
                    mine["served"] += part
                    mine["moved"] += part * (not hit) * case.shape.expert_bytes[s.layer]
        assert table.ids.tolist() == sorted(wanted)
        for name in ("tokens", "steps", "lookups", "hits", "served", "moved"):
            values = [float(wanted[request][name]) for request in sorted(wanted)]
            assert getattr(table, name).tolist() == pytest.approx(values), name


@pytest.mark.parametrize("semantics", ["llama.cpp", "sglang", "per-pick", "bmoe"])
@pytest.mark.parametrize("on_decline", ["stream", "cpu"])
def test_requests_add_up_to_the_result(semantics: str, on_decline: str) -> None:
    rnd = Random(f"{semantics} {on_decline}")
    for _ in range(25):
        case = small_trace(rnd)
        for name in ("lru", "lrfu-admit"):
            replayer = Replayer(case.trace, semantics=semantics, on_decline=on_decline)
            sizes = tuple(
                max(1, replayer.layout.keys_of(i) // 2) for i in range(len(replayer.layout.groups))
            )
            bytes_ = None if semantics != "bmoe" else 60
            cell = Cell(load_policy(name), sizes if bytes_ is None else (), bytes_, 3)
            table = by_request(replayer, replayer.outcomes(cell))
            row = replayer.run(cell)
            sums = {name: column.sum() for name, column in columns_of(table).items()}
            part = row.by_phase["decode"] if row.by_phase["decode"].tokens else row.counters
            if row.hit_rate is None:
                assert sums["lookups"] == 0
            else:
                assert sums["hits"] / sums["lookups"] == pytest.approx(row.hit_rate)
            assert sums["tokens"] == part.tokens and sums["steps"] == pytest.approx(part.steps)
            assert sums["served"] == pytest.approx(part.lookups)
            assert sums["moved"] == pytest.approx(part.bytes_moved)
            if all(len(group.tensor_bytes) == 3 for group in replayer.layout.groups):
                copies = 3 * (part.merged_runs + part.streamed)
                assert sums["copies"] == pytest.approx(copies)
            assert (sums["cpu_bytes"] > 0) == (part.cpu_served > 0)
