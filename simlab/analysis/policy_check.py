"""Is a policy file sound? Each stage runs in a process of its own, with limits on time and memory.

Stages: loaded and compiled with bounds checks; interpreted as plain Python; compiled as it will
run. All replay the same random and adversarial traces under all semantics; the three must agree,
and the last is timed against LRU.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.analysis.stopwatch import interleaved
from simlab.errors import PolicyError, SimlabError
from simlab.trace.schema import DECODE, Trace, TraceMeta

LAYERS, EXPERTS, K = 3, 12, 3
PATIENCE = 20
#: (stage, numba's switch, what it shows when it passes)
STAGES = (
    ("bounds", "NUMBA_BOUNDSCHECK", "compiles; invariants hold, with bounds checks"),
    ("interpreted", "NUMBA_DISABLE_JIT", "interpreted = compiled"),
    ("compiled", "", "compiled as it will run"),
)


@dataclass(frozen=True)
class Passed:
    """A stage that passed: what it showed, and with the last stage the speeds in lookups/s."""

    shown: str
    lookups_per_second: float = 0.0
    lru_lookups_per_second: float = 0.0


def check_policy(path: str, *, seconds: int = 120, mib: int = 4096) -> Iterator[Passed]:
    """Run the stages one after the other.

    Args:
        seconds: most processor time a stage may take, compilation included; other programs do not
            count. A policy that waits is ended after PATIENCE times as long.
        mib: most memory that a stage may add to what Python and numba take, in MiB.

    Raises:
        PolicyError: what is wrong with the policy, in one line.
    """
    digests: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as cache:
        for stage, switch, shown in STAGES:
            found = _in_process(path, stage, switch, cache, seconds, mib)
            digests[stage] = found["digest"]
            if found["digest"] != digests["bounds"]:
                raise PolicyError(
                    f"{path} decides otherwise {'as plain Python' if switch else 'compiled'} than"
                    " compiled with bounds checks: look for integers that overflow and for types"
                    " that change"
                )
            yield Passed(shown, *found.get("speeds", [0.0, 0.0]))


def _in_process(
    path: str, stage: str, switch: str, cache: str, seconds: int, mib: int
) -> dict[str, Any]:
    environment = {**os.environ, "SIMLAB_CACHE_DIR": str(Path(cache) / stage)}
    for other in ("NUMBA_BOUNDSCHECK", "NUMBA_DISABLE_JIT"):
        environment.pop(other, None)
    if switch:
        environment[switch] = "1"
    command = [sys.executable, "-m", __name__, path, stage, str(seconds), str(mib)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE * seconds
        )
        died = signal.Signals(-done.returncode).name if done.returncode < 0 else ""
    except subprocess.TimeoutExpired:
        died = "SIGXCPU"
    if died == "SIGXCPU":
        raise PolicyError(
            f"{path} did not come to an end within {seconds} s ({stage}): a loop that never ends?"
            " (more time: --seconds)"
        )
    if died:
        raise PolicyError(f"{path} crashed Python ({died}, {stage})")
    try:
        told = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PolicyError(f"{path} could not be checked ({stage}): {last}") from None
    if "error" in told:
        raise PolicyError(str(told["error"]))
    return dict(told)


# ---- what runs in the child ---------------------------------------------------------------------


def _trace(sets: npt.NDArray[np.int64], requests: int = 1) -> Trace:
    """A trace of one row per (token, layer); sets: [tokens, LAYERS, k], distinct in a row."""
    tokens, layers, k = sets.shape
    rows = tokens * layers
    each = -(-tokens // requests)
    weights = (1 + np.arange(rows * k) % 7) / 8
    meta = TraceMeta(EXPERTS, k, tuple(range(layers)), expert_bytes=((3,), (3,), (7,)))
    return Trace(
        meta,
        np.repeat(np.arange(tokens) // each, layers).astype(np.int32),
        np.repeat(np.arange(tokens) % each, layers).astype(np.int32),
        np.full(rows, DECODE, np.uint8),
        np.tile(np.arange(layers, dtype=np.int16), tokens),
        np.arange(rows + 1, dtype=np.int64) * k,
        sets.reshape(-1).astype(np.uint16),
        weights=weights.astype(np.float16),
    )


def traces() -> dict[str, Trace]:
    """Random, sticky and hostile picks, small enough to be interpreted."""
    rng = np.random.default_rng(0)
    n = 60
    random = rng.permuted(np.tile(np.arange(EXPERTS), (n, LAYERS, 1)), axis=2)[:, :, :K]
    skewed = np.argsort(rng.random((n, LAYERS, EXPERTS)) * (1 + np.arange(EXPERTS)), axis=2)
    scan = (np.arange(n * LAYERS * K).reshape(n, LAYERS, K)) % EXPERTS
    same = np.tile(np.arange(K), (n, LAYERS, 1))
    turns = np.where(np.arange(n)[:, None, None] % 2, same, same + K)
    return {
        "random picks": _trace(random, 4),
        "skewed picks": _trace(skewed[:, :, :K], 3),
        "a scan over all experts": _trace(scan),
        "the same picks for ever": _trace(same, 2),
        "two sets in turns": _trace(turns),
    }


def _decisions(path: str) -> str:
    """Replay everything twice; a digest over what became of each lookup."""
    from simlab.policy.registry import load_policy
    from simlab.replay.cell import Cell
    from simlab.replay.run import Replayer

    policy = load_policy(path)
    digest = hashlib.sha256()
    keys = LAYERS * EXPERTS
    for name, trace in traces().items():
        for semantics in ("llama.cpp", "per-pick", "bmoe"):
            replayer = Replayer(trace, semantics=semantics)
            for lanes in (1, 4):
                for slots in (1, K, 2 * K, keys // 2, keys - 1, keys):
                    if semantics == "bmoe":
                        cell = Cell(policy, (), 5 * slots, lanes)
                    else:
                        # one slot, then as many in the groups that are smaller
                        sizes = tuple(
                            min(slots, replayer.layout.keys_of(g))
                            for g in range(len(replayer.layout.groups))
                        )
                        cell = Cell(policy, sizes, None, lanes)
                    found = replayer.outcomes(cell)
                    again = replayer.outcomes(cell)
                    if not np.array_equal(found.outcome, again.outcome):
                        raise PolicyError(
                            f"{path} decides otherwise the second time ({name}, {semantics}, slots"
                            f" {slots}): all that it remembers must be made in init()"
                        )
                    digest.update(found.outcome.tobytes() + found.runs.tobytes())
    return digest.hexdigest()


def _speeds(path: str) -> list[float]:
    """Lookups per second of processor time, of the policy and of LRU: 24 x 32 keys, k = 4."""
    from simlab.policy.registry import load_policy
    from simlab.replay.cell import Cell
    from simlab.replay.run import Replayer

    rng = np.random.default_rng(1)
    tokens, layers, experts, k = 2000, 24, 32, 4
    chance = rng.random((layers, experts)) * 2
    sets = np.argsort(rng.random((tokens, layers, experts)) + chance, axis=2)[:, :, :k]
    rows = tokens * layers
    trace = Trace(
        TraceMeta(experts, k, tuple(range(layers))),
        np.zeros(rows, np.int32),
        np.repeat(np.arange(tokens, dtype=np.int32), layers),
        np.full(rows, DECODE, np.uint8),
        np.tile(np.arange(layers, dtype=np.int16), tokens),
        np.arange(rows + 1, dtype=np.int64) * k,
        sets.reshape(-1).astype(np.uint16),
        weights=np.full(rows * k, 0.25, np.float16),
    )
    replayer = Replayer(trace)
    contenders = {
        name: partial(replayer.outcomes, Cell(load_policy(source), (layers * experts // 4,)))
        for name, source in {"policy": path, "lru": "lru"}.items()
    }
    seconds = interleaved(contenders, rounds=3, clock=time.process_time)
    return [rows * k / each for each in seconds.values()]


def _limit(seconds: int, mib: int) -> None:
    """Let this process run and grow by so much and no more, where the system can (Linux)."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    most = pages * resource.getpagesize() + mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _child(path: str, stage: str, seconds: int, mib: int) -> dict[str, Any]:
    import simlab.replay.run  # the libraries are not the policy's memory

    assert simlab.replay.run
    _limit(seconds, mib)
    try:
        told: dict[str, Any] = {"digest": _decisions(path)}
        if stage == "compiled":
            told["speeds"] = _speeds(path)
        return told
    except SimlabError as exc:
        return {"error": str(exc)}
    except MemoryError:
        return {"error": f"{path} takes more than {mib} MiB of memory (more: --memory)"}


if __name__ == "__main__":
    told = _child(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.write("\n" + json.dumps(told) + "\n")
