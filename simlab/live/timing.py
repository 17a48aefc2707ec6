"""From the times of steps to the figures of a cell: means a token, medians, spread, efficiency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.cost.model import Work
from simlab.live.engine import Run
from simlab.replay.access import Access
from simlab.trace.schema import PREFILL

#: The default warm-up: this share of the timed steps, and at most so many.
WARM_UP_SHARE, WARM_UP_MOST = 0.1, 64


def timed_steps(access: Access, done: int, warm_up: int | None) -> npt.NDArray[np.int64]:
    """The steps whose times count: decode steps (any, where there is none) after the warm-up."""
    steps = np.flatnonzero(access.step_phase[:done] != PREFILL)
    if not len(steps):
        steps = np.arange(done)
    if warm_up is None:
        warm_up = min(int(len(steps) * WARM_UP_SHARE), WARM_UP_MOST)
    return np.asarray(steps[min(warm_up, max(0, len(steps) - 1)) :], np.int64)


def work_of_steps(run: Run, access: Access, steps: npt.NDArray[np.int64]) -> Work:
    """What those steps asked of the device, as it was really given to it."""
    per_set = np.diff(access.offsets)
    lookups = np.bincount(access.set_step, weights=per_set, minlength=len(access.step_tokens))
    return Work(
        steps=len(steps),
        tokens=int(access.step_tokens[steps].sum()),
        lookups=int(lookups[steps].sum()),
        n_bytes=int(run.n_bytes[steps].sum()),
        copies=int(run.copies[steps].sum()),
    )


def figures(
    runs: Sequence[Run], access: Access, steps: npt.NDArray[np.int64], peak_gb_s: float | None
) -> dict[str, Any]:
    """The timing of a cell that was run once or more.

    Times per token are means over ``steps``, of which the median over the runs is given. Quantiles
    of the step times, and planning per layer, a median too, are over all steps of all runs.
    Efficiency is the rate of the uploads over the probe's peak.
    """
    work = work_of_steps(runs[0], access, steps)
    tokens = max(1, work.tokens)
    sets = np.bincount(access.set_step, minlength=len(access.step_tokens))[steps]

    def mean(name: str) -> float:
        return float(np.median([getattr(run, name)[steps].sum() / tokens for run in runs]))

    means = [float(run.ms[steps].sum()) / tokens for run in runs]
    ms = float(np.median(means))
    every = np.concatenate([run.ms[steps] for run in runs])
    low, mid, high = (float(q) for q in np.quantile(every, (0.1, 0.5, 0.9)))
    upload = mean("upload_ms")
    rate = work.n_bytes / tokens / upload / 1e6 if upload > 0 and work.n_bytes else None
    return {
        "ms_per_token": ms,
        "ms_per_token_low": min(means),
        "ms_per_token_high": max(means),
        "tokens_per_s": 1e3 / ms if ms > 0 else None,
        "step_ms": {"p10": low, "median": mid, "p90": high},
        "upload_ms_per_token": upload,
        "ids_ms_per_token": mean("ids_ms"),
        "plan_us_per_layer": float(np.median([1e3 * run.plan_ms[steps] / sets for run in runs])),
        "issue_ms_per_token": mean("issue_ms"),
        "bytes_per_token": work.n_bytes / tokens,
        "copies_per_token": work.copies / tokens,
        "upload_gb_s": rate,
        "peak_gb_s": peak_gb_s,
        "upload_efficiency": rate / peak_gb_s if rate and peak_gb_s else None,
        "steps": work.steps,
        "tokens": work.tokens,
        "repeats": len(runs),
    }
