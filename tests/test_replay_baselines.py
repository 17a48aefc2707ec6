"""Engines without an adaptive cache, and pinned experts beside a pool, against slow twins."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from naive import Run, prepare
from naive import replay as naive_replay
from strategies import SmallTrace, small_trace

from simlab.cli import main
from simlab.errors import UsageError
from simlab.policy.registry import load_policy
from simlab.replay.baselines import BASELINES, parse_baselines, run_baseline
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.trace.write import write_trace


def case_of(number: int) -> tuple[SmallTrace, Replayer, Run, int]:
    case = small_trace(Random(3000 + number))
    concurrency = 1 + number % 3
    replayer = Replayer(case.trace)
    return case, replayer, prepare(case.rows, case.shape, "llama.cpp", concurrency), concurrency


@pytest.mark.parametrize("name", ["stream-all", "stream-picks", "cpu-moe"])
def test_without_any_resident_expert(name: str) -> None:
    for number in range(40):
        case, replayer, run, concurrency = case_of(number)
        result = run_baseline(replayer, name, concurrency)
        counters = result.counters
        lookups = sum(len(s.experts) for s in run.sets)
        size = case.shape.expert_bytes
        assert size is not None
        assert (counters.lookups, counters.hits, counters.demand_uploads) == (lookups, 0, 0)
        moved = {
            "stream-all": sum(case.shape.n_expert * size[s.layer] for s in run.sets),
            "stream-picks": sum(len(s.experts) * size[s.layer] for s in run.sets),
            "cpu-moe": 0,
        }[name]
        assert counters.bytes_moved == moved
        assert counters.cpu_served == (lookups if name == "cpu-moe" else 0)
        for parts in (result.by_class, result.by_phase):
            assert sum(part.bytes_moved or 0 for part in parts.values()) == moved
        assert sum(layer["bytes_moved"] for layer in result.by_layer) == moved
        assert sum(window["bytes_moved"] for window in result.windows) == moved
        assert (result.policy, result.pool, result.capacity_bytes) == (name, "none", 0)


def test_whole_layers_of_a_pool_s_bytes() -> None:
    seen = set()
    for number in range(60):
        case, replayer, run, concurrency = case_of(number)
        size, n_expert = case.shape.expert_bytes, case.shape.n_expert
        assert size is not None
        slots = [len(group) * n_expert * (1 + number % 4) // 4 for group in case.shape.groups]
        room = sum(n * size[group[0]] for n, group in zip(slots, case.shape.groups, strict=True))
        kept = []
        for layer in reversed(case.shape.layers):
            room -= size[layer] * n_expert
            if room < 0:
                break
            kept.append(layer)
        result = run_baseline(replayer, "n-cpu-moe", concurrency, slots)
        hits = sum(len(s.experts) for s in run.sets if s.layer in kept)
        assert result.counters.hits == hits
        assert result.counters.cpu_served == result.counters.misses
        assert result.counters.bytes_moved == 0
        assert sum(result.slots) == len(kept) * n_expert
        assert result.capacity_bytes == sum(size[layer] for layer in kept) * n_expert
        told = f"{len(case.shape.layers) - len(kept)} of {len(case.shape.layers)} layers on the CPU"
        assert told in " ".join(result.notes)
        seen.add(len(kept))
    assert len(seen) > 2


def pinned_by_hand(case: SmallTrace, count: int) -> dict[int, set[int]]:
    """The most picked experts of each layer by decode rows, or by all."""
    rows = [row for row in case.rows if row[2] == 1] or case.rows
    picks: dict[int, Counter[int]] = defaultdict(Counter)
    for _, _, _, layer, experts in rows:
        picks[layer].update(experts)
    return {
        layer: set(sorted(range(case.shape.n_expert), key=lambda e: (-picks[layer][e], e))[:count])
        for layer in case.shape.layers
    }


@pytest.mark.parametrize("policy", ["lru", "mix", "opt"])
def test_pins_are_hits_and_the_pool_never_sees_them(policy: str) -> None:
    compared = 0
    for number in range(60):
        case, _, run, concurrency = case_of(number)
        n_expert = case.shape.n_expert
        count = 1 + number % 2
        with_rows = {row[3] for row in case.rows if row[2] == 1} or {row[3] for row in case.rows}
        if count >= n_expert or with_rows != set(case.shape.layers):
            continue
        pins = pinned_by_hand(case, count)
        keys = [len(group) * n_expert for group in case.shape.groups]
        slots = [
            max(len(g) * count + 1, n * 2 // 3)
            for g, n in zip(case.shape.groups, keys, strict=True)
        ]
        left = [n - len(g) * count for n, g in zip(slots, case.shape.groups, strict=True)]
        sets = [
            s._replace(experts=[e for e in s.experts if e not in pins[s.layer]]) for s in run.sets
        ]
        tally = naive_replay(Run(run.shape, run.semantics, run.steps, sets), policy, left)
        pinned = sum(e in pins[s.layer] for s in run.sets for e in s.experts)
        replayer = Replayer(case.trace, pin=count)
        result = replayer.run(Cell(load_policy(policy), tuple(slots), None, concurrency))
        counters = result.counters
        assert counters.hits == tally.total["hits"] + pinned
        for name in ("demand_uploads", "streamed", "cpu_served", "merged_runs", "bytes_moved"):
            assert getattr(counters, name) == tally.total[name], name
        for name, part in result.by_class.items():
            assert part.misses == tally.by_class[name]["misses"], name
        flags = {
            (s.step, s.layer, e): e in pins[s.layer] or tally.flags[s.step, s.layer, e]
            for s in run.sets
            for e in s.experts
        }
        assert counters.pick_hits == sum(
            flags[s.step, s.layer, e] for s in run.sets for _, e in s.picks
        )
        assert f"{count} pinned a layer" in result.pool
        assert "hindsight" in " ".join(result.notes)
        compared += 1
    assert compared >= 30


def test_pins_of_another_trace() -> None:
    case = small_trace(Random(3001), decode_only=True)
    other = replace(
        case.trace, experts=(case.shape.n_expert - 1 - case.trace.experts).astype(np.uint16)
    )
    own, told = Replayer(case.trace, pin=1), Replayer(case.trace, pin=1, pin_from=other)
    assert own.pinned is not None and told.pinned is not None
    assert (own.pinned.sum(1) == 1).all() and (told.pinned.sum(1) == 1).all()
    assert not (own.pinned == told.pinned).all()
    slots = tuple(
        replayer_keys for replayer_keys in map(told.layout.keys_of, range(len(told.pools)))
    )
    assert "hindsight" not in " ".join(told.run(Cell(load_policy("lru"), slots)).notes)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = small_trace(Random(3005), decode_only=True)
    path = str(tmp_path / "t.parquet")
    write_trace(case.trace, path)
    args = ["replay", path, "--policy", "lru", "--slots", "50%,100%"]
    assert main([*args, "--baselines", "all", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == [
        "lru", "lru", "stream-all", "stream-picks", "cpu-moe", "n-cpu-moe", "n-cpu-moe",
    ]  # fmt: skip
    assert rows[-1]["hits"] == rows[-1]["lookups"]
    assert main([*args, "--baselines", "cpu-moe"]) == 0
    assert "cpu-moe: all experts are computed on the CPU" in capsys.readouterr().out
    assert main([*args, "--pin", "1"]) == 0
    assert "1 experts of each layer are pinned" in capsys.readouterr().out
    for wrong, message in (
        (["--baselines", "gpu"], "there are stream-all"),
        (["--pin", "99"], "--pin takes 1 to"),
        (["--pin", "1", "--baselines", "all"], "leave out --pin"),
        (["--pin", "1", "--slots", "1"], "takes all 1 slots"),
        (["--pin-from", path], "--pin-from needs --pin"),
        (["--semantics", "per-pick", "--baselines", "all"], "per-pick"),
    ):
        base = args[:4] if "--slots" in wrong else args
        assert main([*base, *wrong]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


def test_every_baseline_is_told() -> None:
    assert parse_baselines("all") == list(BASELINES)
    with pytest.raises(UsageError, match="there is no baseline"):
        parse_baselines("cpu-moe,,")
