"""The kernels as plain Python, and compiled with bounds checks: a wrong index cannot hide.

numba reads these switches once, when it is imported, so each run is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "switch",
    ["NUMBA_DISABLE_JIT", pytest.param("NUMBA_BOUNDSCHECK", marks=pytest.mark.slow)],
)
def test_kernel_is_the_naive_twin(repo: Path, tmp_path: Path, switch: str) -> None:
    """Thirty random traces under every policy and all semantics."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command += [f"--basetemp={tmp_path / 'inner'}", "-k", "naive_twin and 0] and not every_size"]
    done = subprocess.run(
        [*command, "tests/test_replay_naive.py"],
        cwd=repo,
        env={**os.environ, switch: "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "4 passed" in done.stdout  # a chunk of each semantics


def test_the_live_planner_is_plain_python_too(repo: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command += [f"--basetemp={tmp_path / 'inner'}", "-k", "says or gate or declined or no_expert"]
    done = subprocess.run(
        [*command, "tests/test_live_planner.py"],
        cwd=repo,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "6 passed" in done.stdout
