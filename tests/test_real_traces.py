"""Experiment files: chosen on one half, reported on the other; and what is written of it."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from simlab.analysis.split import split_trace
from simlab.replay.run import replay_cell
from simlab.resources import CAPTURED_TRACE, root
from simlab.trace.edit import slice_trace
from simlab.trace.hash import content_hash
from simlab.trace.read import read_trace
from simlab.trace.schema import Trace
from simlab.trace.write import write_trace

SCRIPTS = root() / "scripts"

RUN = """
trace = "{trace}"

[run]
slots = ["25%"]
concurrency = [1, 2]
prefill = "skip"
resamples = 200
choose_tokens = 64

[[row]]
name = "lru"
policies = ["lru"]

[[row]]
name = "simple"
policies = ["fifo", "lrfu"]
grid.lrfu.half_life = [2, 32]

[[row]]
name = "admit, bytes"
policies = ["lrfu-admit"]
grid.lrfu-admit.margin = [0, 3]
choose = "bytes"

[[row]]
name = "static-pin"
policies = ["static-pin"]

[[row]]
name = "opt"
policies = ["opt"]
"""


@pytest.fixture(scope="module")
def runner():
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("real_traces", SCRIPTS / "real_traces.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["real_traces"] = module  # its dataclasses look themselves up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


@pytest.fixture(scope="module")
def trace() -> Trace:
    whole = read_trace(str(root() / "traces" / CAPTURED_TRACE))
    return slice_trace(whole, requests=np.unique(whole.request)[:12].tolist())


@pytest.fixture
def experiment(tmp_path: Path, trace: Trace) -> Path:
    write_trace(trace, tmp_path / "tiny.parquet")
    path = tmp_path / "tiny.toml"
    path.write_text(RUN.format(trace=tmp_path / "tiny.parquet"))
    return path


def lines_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as source:
        return list(csv.DictReader(source))


def test_an_experiment(runner, experiment: Path, trace: Trace, capsys) -> None:
    assert runner.main([str(experiment), "--jobs", "1"]) == 0
    lines = lines_of(experiment.with_suffix(".csv"))
    assert [(x["concurrency"], x["row"]) for x in lines] == [
        (c, row) for c in "12" for row in ("lru", "simple", "admit, bytes", "static-pin", "opt")
    ]
    held_out = split_trace(trace).held_out
    keys = len(trace.meta.moe_layers) * trace.meta.n_expert
    for line in lines:
        assert line["trace_hash"] == content_hash(trace) and line["simlab"]
        low, value, high = (float(line[f"hit_rate{end}"]) for end in ("_low", "", "_high"))
        assert low <= value <= high
        if line["row"] != "static-pin":
            policy, _, given = line["chosen"].partition(":")
            params = dict(pair.split("=") for pair in given.split(",") if pair)
            single = replay_cell(
                held_out,
                policy=policy,
                slots=keys // 4,
                concurrency=int(line["concurrency"]),
                params={k: float(v) for k, v in params.items()},
                prefill="skip",
                on_decline="cpu",
            )
            assert single.hit_rate == pytest.approx(value, rel=1e-5)
            assert single.uploads_per_token == pytest.approx(
                float(line["uploads_per_token"]), rel=1e-4
            )
        if line["row"] in ("lru", "opt"):
            assert float(line["gap_closed"]) == (line["row"] == "opt")

    capsys.readouterr()
    assert runner.main([str(experiment), "--tables"]) == 0
    table = capsys.readouterr().out
    assert "| trace, C | simple |" in table and "C = 2: share of the gap closed, %" in table
    assert f"{100 * float(lines[0]['hit_rate']):.1f}" in table


def test_the_pin_is_that_of_the_other_half(runner, experiment: Path, trace: Trace) -> None:
    assert runner.main([str(experiment), "--only", "static-pin", "--jobs", "1"]) == 0
    line = lines_of(experiment.with_suffix(".csv"))[0]
    parts = split_trace(trace)
    counts = []
    for part in (parts.tuning, parts.held_out):
        decode = np.repeat(part.phase == 1, np.diff(part.offsets))
        layer = np.repeat(part.layer, np.diff(part.offsets))[decode]
        picks = np.zeros((int(layer.max()) + 1, part.meta.n_expert), int)
        np.add.at(picks, (layer, part.experts[decode]), 1)
        counts.append(picks.ravel())
    slots = len(trace.meta.moe_layers) * trace.meta.n_expert // 4
    hot = np.argsort(-counts[0], kind="stable")[:slots]
    assert float(line["hit_rate"]) == pytest.approx(
        counts[1][hot].sum() / counts[1].sum(), rel=1e-5
    )
    assert float(line["mib_per_token"]) == 0


def test_some_rows_again(runner, experiment: Path) -> None:
    target = experiment.with_suffix(".csv")
    assert runner.main([str(experiment), "--jobs", "1"]) == 0
    before = lines_of(target)
    assert runner.main([str(experiment), "--only", "simple", "--jobs", "1"]) == 0
    after = lines_of(target)
    assert all(x.pop("command") for x in (*before, *after))
    assert after == before
    experiment.write_text(experiment.read_text().replace("[2, 32]", "[8]"))
    assert runner.main([str(experiment), "--only", "simple", "--jobs", "1"]) == 0
    changed = [
        x["row"]
        for x, y in zip(lines_of(target), before, strict=True)
        if x["chosen"] != y["chosen"]
    ]
    assert changed == ["simple", "simple"]
    new = lines_of(target)
    experiment.write_text(experiment.read_text().replace("[8]", "[2, 32]"))
    assert runner.main([str(experiment), "--again", "--only", "simple", "--jobs", "1"]) == 0
    again = lines_of(target)
    assert all(x.pop("command") for x in (*new, *again))
    assert again == new
    assert runner.main([str(experiment), "--only", "no-such-row"]) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[run]", "[walk]"), "'run' is missing"),
        (('["lru"]', '["no-such"]'), "no-such"),
        (("25%", "-1"), "--slots"),
        (("trace =", "trace ="), ""),
    ],
)
def test_bad_experiments(runner, experiment: Path, capsys, change, message) -> None:
    experiment.write_text(experiment.read_text().replace(*change))
    if not message:
        experiment.write_text(RUN.format(trace="../nowhere/picks.parquet"))
        message = "../nowhere/picks.parquet is missing beside the checkout"
    assert runner.main([str(experiment)]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert error.count("\n") == 1
    assert not experiment.with_suffix(".csv").exists()


def test_the_experiments_that_ship_can_be_read(runner) -> None:
    found = sorted((root() / "experiments").glob("*.toml"))
    assert len(found) == 4
    for path in found:
        rows = {row.name for row in runner.read_experiment(path).rows}
        assert {"lru", "stale", "mix", "mix-tr", "opt", "opt-bypass"} <= rows
