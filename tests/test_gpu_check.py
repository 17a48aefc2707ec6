"""scripts/gpu_check: the whole command on the cpu device, without what a GPU machine may lack."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="gpu_check needs torch: pip install 'simlab[capture]'")
pytest.importorskip("transformers", reason="gpu_check captures a model of transformers")

from simlab.cost.link import read_profile
from simlab.result.store import read_results
from simlab.trace.read import read_trace

ABSENT = ("polars", "pandas", "plotly", "rich", "platformdirs")

RUN = """
import runpy, sys

for name in {absent!r}:
    sys.modules[name] = None  # as if it were not installed

sys.argv[:] = ["gpu_check", *{arguments!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_the_whole_command_without_the_report_stack(
    repo: Path, shared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--small", "--out", str(out), "--seconds", "2400"]
    code = RUN.format(absent=ABSENT, arguments=arguments, script=str(repo / "scripts/gpu_check"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary) == {"probe", "trace in the loop", "capture", "model in the loop"}
    assert all(part["ok"] for part in summary.values())
    table = done.stdout[done.stdout.rindex("\nprobe (") :]
    assert "18 of 18 cells equal to the simulation" in table
    assert table.count("host memory copy, not PCIe") >= 2
    assert read_profile(out / "link.json").device == "cpu"
    rows = read_results(out / "live.json")
    assert len(rows) == 3 * 18
    measured = [row for row in rows if row.kind == "measured"]
    assert {row.policy for row in measured} == {"lru", "mix", "lfu-decay"}
    assert {row.concurrency for row in measured} == {1, 4}
    assert len({row.slots for row in measured}) == 3
    assert all(set(row.timing["baselines_ms_per_token"]) for row in measured)
    assert not any(row.synthetic for row in rows)
    assert read_trace(str(out / "captured.parquet")).n_picks > 1000


def test_without_a_gpu_it_says_so_and_ends_with_exit_code_1(repo: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    command = [sys.executable, str(repo / "scripts/gpu_check"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stdout.count("FAILED: UsageError: ") == 4
    assert "torch finds no CUDA device here" in done.stdout


def test_a_part_that_takes_too_long_ends(repo: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, str(repo / "scripts/gpu_check"), "--device", "cpu", "--seconds", "6",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    ends = re.findall("FAILED: SimlabError: (the time was up|no time was left for it)", done.stdout)
    assert len(ends) == 4
