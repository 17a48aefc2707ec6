"""The trace of a live run, replayed: the same hits, misses and bytes, or where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simlab.live.pooled import Lookups
from simlab.live.timing import timed_steps
from simlab.replay import kernel
from simlab.replay.access import Access
from simlab.replay.cell import Cell, Outcomes
from simlab.replay.row import result_row
from simlab.replay.run import Replayer
from simlab.result.schema import Result

#: Counters that the live run and the replay of its trace must share.
COUNTED = (
    "steps", "tokens", "lookups", "hits", "misses", "demand_uploads", "streamed", "cpu_served",
    "merged_runs", "bytes_moved",
)  # fmt: skip
_WORDS = {
    kernel.UPLOADED: "uploaded",
    kernel.HIT: "hit",
    kernel.DECLINED: "declined",
    kernel.LARGE_HIT: "hit on the large path",
    kernel.LARGE_STREAMED: "missed on the large path",
}


@dataclass(frozen=True)
class Check:
    """A live run beside the replay of the trace that it made.

    Attributes:
        simulated: the replay's row.
        measured: the live run's row, counted from what was planned and copied; None when the live
            run saw other access sets than its trace holds.
        difference: the first thing that differs, in words; empty when nothing does.
    """

    simulated: Result
    measured: Result | None
    difference: str

    @property
    def equal(self) -> bool:
        """Every lookup, every merged run and every byte agree."""
        return not self.difference


def check_run(
    replayer: Replayer,
    cell: Cell,
    log: Sequence[Lookups],
    bytes_copied: int,
    started: float,
) -> Check:
    """Hold a live run to the replay of its trace.

    Args:
        replayer: of the trace, with ``schedule="recorded"``.
        log: the access sets of the trace's steps, in the order in which they ran.
        bytes_copied: bytes that the live run copied to the device in those steps.
        started: seconds since the epoch.
    """
    replayed = replayer.outcomes(cell)
    simulated = result_row(replayer, cell, replayed, started)
    difference = _other_sets(replayer, replayed, log)
    if difference:
        return Check(simulated, None, difference)
    live = replace(
        replayed,
        outcome=np.concatenate([*(s.outcome for s in log), np.zeros(0, np.uint8)]),
        runs=np.array([s.runs for s in log], np.int64),
    )
    difference = _other_outcomes(replayer, replayed, live)
    measured = result_row(replayer, cell, live, started)
    planned = measured.counters.bytes_moved
    if not difference and planned != bytes_copied:
        difference = f"{bytes_copied:,} bytes were copied where the plan says {planned:,}"
    counters = replace(measured.counters, bytes_moved=bytes_copied)
    for name in COUNTED:
        was, now = getattr(simulated.counters, name), getattr(counters, name)
        if was != now and not difference:
            difference = f"{name}: live {now:,}, replay {was:,}"
    return Check(simulated, replace(measured, kind="measured", counters=counters), difference)


def _other_sets(replayer: Replayer, replayed: Outcomes, log: Sequence[Lookups]) -> str:
    access = replayed.access
    layers = replayer.trace.meta.moe_layers
    for number, seen in enumerate(log):
        where = f"step {seen.step}, layer {layers[seen.layer]}"
        if number == len(access.set_step):
            break
        place = (int(access.set_step[number]), int(access.set_layer[number]))
        if place != (seen.step, seen.layer):
            return f"live ran {where} where its trace has step {place[0]}, layer {layers[place[1]]}"
        span = slice(*access.offsets[number : number + 2].tolist())
        if not np.array_equal(access.experts[span], seen.experts):
            return (
                f"{where}: live computed experts {seen.experts.tolist()} where its trace has"
                f" {access.experts[span].tolist()}"
            )
    if len(log) != len(access.set_step):
        return f"live ran {len(log):,} access sets and its trace holds {len(access.set_step):,}"
    return ""


def _other_outcomes(replayer: Replayer, replayed: Outcomes, live: Outcomes) -> str:
    access = replayed.access

    def where(number: int) -> str:
        layer = replayer.trace.meta.moe_layers[int(access.set_layer[number])]
        return f"step {int(access.set_step[number])}, layer {layer}"

    different = np.flatnonzero(replayed.outcome != live.outcome)
    if len(different):
        lookup = int(different[0])
        number = int(np.searchsorted(access.offsets, lookup, side="right")) - 1
        return (
            f"{where(number)}, expert {access.experts[lookup]}: live"
            f" {_WORDS[int(live.outcome[lookup])]}, replay {_WORDS[int(replayed.outcome[lookup])]}"
        )
    different = np.flatnonzero(replayed.runs != live.runs)
    if len(different):
        number = int(different[0])
        return (
            f"{where(number)}: live merged its uploads to {live.runs[number]}, replay to"
            f" {replayed.runs[number]}"
        )
    return ""


def step_times(access: Access, ms: Sequence[float]) -> dict[str, Any]:
    """The times of a model's decode steps after a warm-up, as `simlab.live.timing` gives a cell's.

    Args:
        ms: milliseconds of each step.
    """
    known = np.asarray(ms)
    steps = timed_steps(access, min(len(known), len(access.step_tokens)), None)
    tokens = max(1, int(access.step_tokens[steps].sum()))
    mean = float(known[steps].sum()) / tokens
    low, mid, high = (float(q) for q in np.quantile(known[steps], (0.1, 0.5, 0.9)))
    return {
        "ms_per_token": mean,
        "ms_per_token_low": mean,
        "ms_per_token_high": mean,
        "tokens_per_s": 1e3 / mean if mean > 0 else None,
        "step_ms": {"p10": low, "median": mid, "p90": high},
        "steps": len(steps),
        "tokens": tokens,
        "repeats": 1,
    }
