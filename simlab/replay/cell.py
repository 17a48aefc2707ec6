"""A cell, what is asked of the replayer, and its outcomes, what became of each lookup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from simlab.policy.loader import Policy
from simlab.replay.access import Access


@dataclass(frozen=True)
class Cell:
    """One cell to replay.

    Attributes:
        policy: a loaded policy. params: its parameter values.
        slots: slots of each group (llama.cpp, per-pick). budget_bytes: the pool of ``bmoe``.
        notes: printed with the result (a clipped size, a group without cache).
    """

    policy: Policy
    slots: tuple[int, ...] = ()
    budget_bytes: int | None = None
    concurrency: int = 1
    params: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What became of each lookup of a cell.

    Attributes:
        access: the access sets. outcome: uint8 [lookups], the codes of kernel.py (UPLOADED, HIT,
            DECLINED, LARGE_HIT, LARGE_STREAMED). runs: int64 [sets], merged upload runs.
        uncached: bool [MoE layers], layers of groups without a slot.
        peak_bytes: ``bmoe``: the most bytes resident at once.
    """

    access: Access
    outcome: npt.NDArray[np.uint8]
    runs: npt.NDArray[np.int64]
    uncached: npt.NDArray[np.bool_]
    peak_bytes: int | None
