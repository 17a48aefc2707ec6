"""Hit for hit the same as PyPI's libcachesim on real traces, under `per-pick`.

Where its definition differs from ours the difference is stated here and pinned.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from trace_cases import make

from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.kernel import HIT
from simlab.replay.run import Replayer
from simlab.trace.importers import import_trace
from simlab.trace.importers.options import ImportOptions

libcachesim: Any = pytest.importorskip("libcachesim")

TRACES = {"gptoss20b_decode_a": (32, 4), "dsv2lite_a": (64, 6), "olmoe": (64, 8)}
THEIRS = {
    "lru": "LRU",
    "fifo": "FIFO",
    "clock": "Clock",
    "sieve": "Sieve",
    "s3fifo": "S3FIFO",
    "lfu": "LFU",
    "arc": "ARC",
    "opt": "Belady",
}
SHARES = (0.1, 0.3, 0.5)  # the first is below one layer cycle: most have no hit there


@cache
def replayer_of(name: str, path: Path, accesses: int) -> Replayer:
    """The first tokens of a real trace, about so many picks, per pick."""
    n_expert, k = TRACES[name]
    options = ImportOptions(n_expert=n_expert, k=k, phase="decode")
    trace = import_trace("parquet", path, options)
    keep = min(trace.n_rows, accesses // k)
    ends = np.flatnonzero(np.diff(trace.token[: keep + 1]) != 0) + 1  # whole tokens
    rows = slice(0, int(ends[-1]))
    offsets = trace.offsets[: rows.stop + 1]
    part = replace(
        trace,
        request=trace.request[rows],
        token=trace.token[rows],
        phase=trace.phase[rows],
        layer=trace.layer[rows],
        offsets=offsets,
        experts=trace.experts[: offsets[-1]],
    )
    return Replayer(part, semantics="per-pick")


def accesses_of(replayer: Replayer) -> npt.NDArray[np.int64]:
    """The keys in the order in which they are asked for."""
    access = replayer.access(1)
    layers = np.repeat(access.set_layer.astype(np.int64), np.diff(access.offsets))
    return layers * replayer.trace.meta.n_expert + access.experts


def their_hits(policy: str, keys: npt.NDArray[np.int64], slots: int) -> npt.NDArray[np.bool_]:
    """Ask libcachesim for one access after the other."""
    coming: dict[int, int] = {}
    following = np.full(len(keys), np.iinfo(np.int64).max)
    for i in range(len(keys) - 1, -1, -1):
        following[i] = coming.get(int(keys[i]), np.iinfo(np.int64).max)
        coming[int(keys[i])] = i
    simulated = getattr(libcachesim, THEIRS[policy])(cache_size=slots)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = np.zeros(len(keys), np.bool_)
    for i, (key, following_use) in enumerate(zip(keys.tolist(), following.tolist(), strict=True)):
        request.obj_id, request.clock_time = key + 1, i
        request.next_access_vtime = following_use
        hits[i] = simulated.get(request)
    return hits


@pytest.mark.parametrize("policy", THEIRS)
@pytest.mark.parametrize(
    ("name", "accesses"),
    [
        ("gptoss20b_decode_a", 12_000),
        *(pytest.param(name, 100_000, marks=pytest.mark.slow) for name in TRACES),
    ],
)
def test_hit_for_hit(shared: Path, name: str, accesses: int, policy: str) -> None:
    replayer = replayer_of(name, shared / "traces" / f"{name}.parquet", accesses)
    keys = accesses_of(replayer)
    for share in SHARES:
        slots = int(replayer.layout.n_keys * share)
        outcome = replayer.outcomes(Cell(load_policy(policy), (slots,))).outcome
        theirs = their_hits(policy, keys, slots)
        assert share < SHARES[-1] or 0 < theirs.sum() < len(theirs)
        differing = np.flatnonzero((outcome == HIT) != theirs)
        assert len(differing) == 0, (share, differing[:5], len(differing))


@pytest.mark.parametrize("slots", [10, 19])
def test_s3fifo_with_a_small_queue_of_one(slots: int) -> None:
    """Where they differ: theirs admits nothing if a tenth of the slots is one; below, it aborts."""
    keys = np.array([0, 0, 0, 1, 1])
    assert not their_hits("s3fifo", keys, slots).any()
    trace = make([(0, token, 1, 0, [int(key)]) for token, key in enumerate(keys)], 32, k=1)
    outcome = Replayer(trace, semantics="per-pick").outcomes(Cell(load_policy("s3fifo"), (slots,)))
    assert (outcome.outcome == HIT).tolist() == [False, True, True, False, True]
    assert their_hits("s3fifo", keys, 20).tolist() == [False, True, True, False, True]
