"""Pools whose capacity varies over time, against the slow twin and against trying every choice."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from naive import prepare
from naive import replay as naive_replay
from naive_bounds import fewest_misses
from strategies import small_trace
from test_replay_naive import compare, loaded, sizes_of

from simlab.cli import main
from simlab.errors import SimlabError, UsageError
from simlab.policy.registry import load_policy
from simlab.replay.capacity import Capacity, read_capacity
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.trace.write import write_trace

POLICIES = ("lru", "fifo", "random", "mix", "opt", "lfu-decay")


def drawn(rnd: Random) -> dict[int, float]:
    """Changes at some of the first steps, to shares that binary fractions hold exactly."""
    steps = sorted(rnd.sample(range(12), rnd.randint(1, 5)))
    return {step: rnd.choice([0, 0.25, 0.5, 0.75, 1]) for step in steps}


def capacity_of(shares: dict[int, float]) -> Capacity:
    from fractions import Fraction

    return Capacity(tuple(shares), tuple(Fraction(share) for share in shares.values()))


@pytest.mark.parametrize("semantics", ["llama.cpp", "per-pick", "sglang"])
def test_a_varying_pool_is_its_naive_twin(semantics: str) -> None:
    changed = 0
    for number in range(60):
        rnd = Random(5000 + number)
        case, shares = small_trace(rnd), drawn(rnd)
        concurrency = rnd.choice([1, 2, 3])
        replayer = Replayer(
            case.trace, semantics=semantics, capacity=capacity_of(shares), seed=number
        )
        run = prepare(case.rows, case.shape, semantics, concurrency)
        slots = sizes_of(case, semantics)[number % 5]
        clipped = tuple(min(n, replayer.layout.keys_of(g)) for g, n in enumerate(slots))
        for policy in POLICIES:
            tally = naive_replay(run, policy, slots, seed=number, shares=shares)
            result = replayer.run(Cell(loaded(policy), clipped, None, concurrency))
            compare(result, run, tally)
            fixed = Replayer(case.trace, semantics=semantics, seed=number)
            same = fixed.run(Cell(loaded(policy), clipped, None, concurrency))
            changed += same.counters != result.counters
            assert "capacity varies" in " ".join(result.notes)
    assert changed > 100


def test_a_constant_share_is_a_smaller_pool() -> None:
    for number in range(20):
        case = small_trace(Random(6000 + number))
        keys = [len(group) * case.shape.n_expert for group in case.shape.groups]
        half = Replayer(case.trace, capacity=capacity_of({0: 0.5}))
        for policy in ("lru", "mix"):
            found = half.run(Cell(loaded(policy), tuple(keys)))
            small = Replayer(case.trace).run(Cell(loaded(policy), tuple(n // 2 for n in keys)))
            assert found.counters == small.counters


def read(tmp_path: Path, text: str) -> Capacity:
    path = tmp_path / "c.csv"
    path.write_text(text)
    return read_capacity(path)


def test_capacity_files(tmp_path: Path) -> None:
    found = read(tmp_path, "step,share\n2,50%\n\n5,0.25\n9,1\n")
    assert found.slots_at(10, 12).tolist() == [10, 10, 5, 5, 5, 2, 2, 2, 2, 10, 10, 10]
    assert read(tmp_path, "\ufeffstep, share\n0,0.1\n").slots_at(10, 2).tolist() == [1, 1]
    assert found.slots_at(10, 3).tolist() == [10, 10, 5]
    for text, message in (
        ("", "line 1: the columns"),
        ("slots\n1\n", "line 1: the columns"),
        ("step,share\n", "has no row"),
        ("step,share\n1\n", "line 2: a row is"),
        ("step,share\n1,x\n", "line 2: a row is"),
        ("step,share\n1,1/0\n", "line 2: a row is"),
        ("step,share\n1,1e999999999\n", "line 2"),
        ("step,share\n1,1.5\n", "line 2: shares lie in 0 to 1"),
        ("step,share\n1,101%\n", "line 2: shares lie in 0 to 1"),
        ("step,share\n-1,1\n", "line 2: a row is"),
        ("step,share\n3,1\n3,0.5\n", "line 3: steps must ascend"),
        ("step,share\n\x00\x00\n", "line 2|not a CSV"),
    ):
        with pytest.raises(SimlabError, match=message):
            read(tmp_path, text)
    with pytest.raises(UsageError, match="there is no file"):
        read_capacity(tmp_path / "none.csv")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = small_trace(Random(6003), decode_only=True)
    trace, file = tmp_path / "t.parquet", tmp_path / "c.csv"
    write_trace(case.trace, trace)
    file.write_text("step,share\n1,50%\n")
    args = ["replay", str(trace), "--policy", "lru", "--slots", "100%", "--capacity", str(file)]
    assert main([*args, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert "from 50 % to 100 % of their slots" in " ".join(row["notes"])
    assert main([*args[:4], "--mib", "1", "--semantics", "bmoe", *args[-2:]]) == 2
    assert "--capacity is not for bmoe" in capsys.readouterr().err


def test_opt_is_the_best_choice_while_the_pool_varies() -> None:
    """Every order of evictions is tried, with pools that shrink and grow between sets."""
    compared = 0
    for number in range(150):
        rnd = Random(7000 + number)
        case = small_trace(rnd, max_requests=2, max_tokens=4, decode_only=True)
        if len(case.shape.groups) > 1:
            continue
        run = prepare(case.rows, case.shape, "llama.cpp", 1)
        sets = [frozenset((s.layer, e) for e in s.experts) for s in run.sets]
        ids = {key: i for i, key in enumerate(sorted(frozenset().union(*sets)))}
        least = min(case.shape.k, case.shape.n_expert)
        if len(sets) > 40 or len(ids) > 12 or 2 * least > len(ids):
            continue
        slots, shares = 4 * least, {0: 1.0, 2: 0.5, 4: 1.0, 5: 0.25, 6: 0.75}
        share, sizes = 1.0, []
        by_step = {}
        for step in range(len(run.steps)):
            share = shares.get(step, share)
            by_step[step] = int(slots * share)
        sizes = [by_step[s.step] for s in run.sets]
        if slots > case.trace.n_keys:
            continue
        replayer = Replayer(case.trace, capacity=capacity_of(shares))
        found = replayer.run(Cell(load_policy("opt"), (slots,)))
        keyed = [frozenset(ids[key] for key in members) for members in sets]
        assert found.counters.misses == fewest_misses(keyed, sizes)
        compared += 1
    assert compared > 10
