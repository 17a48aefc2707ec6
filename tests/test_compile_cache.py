"""Compiled policies on disk: many processes at once, no usable folder, and interpreted runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPLAY = """
import sys
sys.path.insert(0, {tests!r})
from test_policy_files import small_trace
from simlab.replay.run import replay_cell
for policy in {policies!r}.split():
    counters = replay_cell(small_trace(), policy=policy, slots=6).counters
    print(policy, counters.lookups, counters.hits, counters.merged_runs)
"""


def start(
    repo: Path, cache: Path | str, policies: str = "lru", **environment: str
) -> subprocess.Popen[str]:
    code = REPLAY.format(tests=str(repo / "tests"), policies=policies)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=repo,
        env={**os.environ, "SIMLAB_CACHE_DIR": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def test_eight_processes_on_an_empty_folder(repo: Path, tmp_path: Path) -> None:
    processes = [start(repo, tmp_path / "cache") for _ in range(8)]
    found = {finish(process) for process in processes}
    assert len(found) == 1
    kernels = tmp_path / "cache" / "kernels"
    assert len(list(kernels.glob("kernel_lru_*.py"))) == 1
    assert not list(kernels.glob("*.tmp"))
    # one process compiled, the others loaded: one file of machine code for the one signature
    assert len(list(kernels.glob("__pycache__/*.replay-*.nbc"))) == 1


def test_no_usable_cache_folder(repo: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    assert finish(start(repo, in_the_way)) == finish(start(repo, tmp_path / "cache"))


def test_a_damaged_kernel_is_made_again(repo: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    good = finish(start(repo, cache))
    for file in (cache / "kernels" / "__pycache__").glob("*.nbc"):
        file.write_bytes(file.read_bytes()[:100])
    assert finish(start(repo, cache)) == good
    for file in (cache / "kernels").glob("*.py"):
        file.write_text("")
    assert finish(start(repo, cache)) == good


def test_no_policy_leaves_its_arrays(repo: Path, tmp_path: Path, isolated_cache: Path) -> None:
    """Compiled with bounds checks: an index out of range would raise instead of writing."""
    risky = "lfu arc random opt-bypass"
    checked = start(repo, tmp_path / "cache", risky, NUMBA_BOUNDSCHECK="1")
    assert finish(checked) == finish(start(repo, isolated_cache, risky))


def test_compiled_code_still_multiplies_matrices():
    """numba's array functions load without SciPy; a policy that needs its BLAS gets it anyway."""
    code = (
        "import sys\n"
        "import simlab.policy.jit\n"
        "assert 'scipy.linalg' not in sys.modules\n"
        "import numba, numpy\n"
        "two = numpy.array([[1.0, 2.0], [3.0, 4.0]])\n"
        "product = numba.njit(lambda a: a @ a)(two)\n"
        "assert (product == two @ two).all()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
