"""Speculative verification: drafted tokens verified together, an approximation, named so."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from naive import prepare
from naive import replay as naive_replay
from strategies import small_trace
from test_replay_options import requests, steps

from simlab.cli import main
from simlab.errors import UsageError
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.replay.schedule import accepted_drafts
from simlab.trace.write import write_trace


def test_schedules_by_hand() -> None:
    trace = requests((1, 5), (0, 2))
    prompt = [(0, 0)]
    assert steps(trace, draft=2, acceptance=1.0) == [
        prompt,
        [(0, 1), (0, 2), (0, 3)],
        [(0, 4), (0, 5)],
        [(1, 0), (1, 1)],
    ]
    assert steps(trace, draft=2, acceptance=0.0) == [
        prompt,
        [(0, 1), (0, 2), (0, 3)],
        [(0, 2), (0, 3), (0, 4)],
        [(0, 3), (0, 4), (0, 5)],
        [(0, 4), (0, 5)],
        [(0, 5)],
        [(1, 0), (1, 1)],
        [(1, 1)],
    ]
    assert steps(trace, concurrency=2, draft=1, acceptance=1.0) == [
        prompt,
        [(0, 1), (0, 2), (1, 0), (1, 1)],
        [(0, 3), (0, 4)],
        [(0, 5)],
    ]
    assert steps(trace, draft=0) == steps(trace)


def test_accepted_runs() -> None:
    drawn = accepted_drafts(200_000, 4, 0.7, 1)
    for length in range(5):
        wanted = 0.7**length * (0.3 if length < 4 else 1)
        assert np.mean(drawn == length) == pytest.approx(wanted, abs=0.005)
    assert accepted_drafts(3, 4, 1.0, 1).tolist() == [4, 4, 4]
    assert accepted_drafts(3, 4, 0.0, 1).tolist() == [0, 0, 0]
    assert (accepted_drafts(50, 4, 0.5, 7) == accepted_drafts(50, 4, 0.5, 7)).all()


@pytest.mark.parametrize("semantics", ["llama.cpp", "sglang"])
def test_drafts_are_their_naive_twin(semantics: str) -> None:
    for number in range(60):
        rnd = Random(8000 + number)
        case = small_trace(rnd)
        draft, acceptance = rnd.randint(1, 3), rnd.choice([0.0, 0.4, 0.8, 1.0])
        concurrency, seed = rnd.choice([1, 2, 3]), rnd.randint(0, 99)
        replayer = Replayer(
            case.trace, semantics=semantics, draft=draft, acceptance=acceptance, seed=seed
        )
        accepted = accepted_drafts(10_000, draft, acceptance, seed)[: len(case.tokens)]
        # the product draws one number for each token of the run
        drawn = accepted_drafts(len(case.tokens), draft, acceptance, seed)
        assert (accepted == drawn).all()
        run = prepare(
            case.rows, case.shape, semantics, concurrency, draft=draft, accepted=drawn.tolist()
        )
        pools = len(replayer.pools)
        slots = [max(1, replayer.layout.keys_of(i) * 2 // 3) for i in range(pools)]
        result = replayer.run(Cell(load_policy("lru"), tuple(slots), None, concurrency))
        tally = naive_replay(run, "lru", slots)
        for name in ("lookups", "hits", "misses", "demand_uploads", "streamed", "bytes_moved"):
            assert getattr(result.counters, name) == tally.total[name], name
        decode = [step for step in run.steps if not step.prefill]
        produced = sum(row[1] == 1 for row in {(r[0:2], r[2]) for r in case.rows})
        if decode:
            uploads = tally.by_phase["decode"]["demand_uploads"]
            assert result.uploads_per_token == pytest.approx(uploads / produced)
            lanes = [len({request for request, _ in step.tokens}) for step in decode]
            assert result.busy_lanes == pytest.approx(np.mean(lanes))
        assert any(note.startswith("APPROXIMATE") for note in result.notes)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "t.parquet")
    write_trace(requests((2, 9), (1, 7)), path)
    args = ["replay", path, "--policy", "lru", "--slots", "50%"]
    assert main([*args, "--draft", "3", "--acceptance", "0.5", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert "3 drafted tokens a step and stream, of which 50 %" in " ".join(row["notes"])
    assert main([*args, "--draft", "2"]) == 0
    assert "APPROXIMATE" in capsys.readouterr().out
    for wrong in (["--draft", "-1"], ["--draft", "65"], ["--draft", "2", "--acceptance", "1.5"]):
        assert main([*args, *wrong]) == 2
        assert "--draft takes 0 to 64" in capsys.readouterr().err
    with pytest.raises(UsageError, match="leave out --draft"):
        steps(requests((0, 3)), schedule="recorded", draft=1)
