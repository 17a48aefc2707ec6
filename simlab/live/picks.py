"""The picks of a schedule as a router would give them: per step and layer, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.replay.access import Access
from simlab.trace.schema import Trace


def picks_of(trace: Trace, access: Access) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Offsets int64 [sets + 1] and picks int64 of every access set: lane order, then router order,
    repeats and all.

    Args:
        access: sets of distinct experts, one per step and layer with a row.
    """
    schedule, row_start = access.schedule, access.tokens.row_start
    step = np.repeat(np.arange(schedule.n_steps), np.diff(schedule.offsets))
    n_rows = row_start[schedule.token + 1] - row_start[schedule.token]
    rows = _ranges(row_start[schedule.token], n_rows)
    row_step = np.repeat(step, n_rows)
    row_layer = access.layer_index[rows]
    order = np.lexsort((row_layer, row_step))  # stable: lanes keep their order
    rows, row_step, row_layer = rows[order], row_step[order], row_layer[order]
    first = np.flatnonzero(
        np.append(True, (row_step[1:] != row_step[:-1]) | (row_layer[1:] != row_layer[:-1]))
    )
    length = trace.offsets[rows + 1] - trace.offsets[rows]
    ends = np.append(0, np.cumsum(length))
    offsets = ends[np.append(first, len(rows))]
    picks = trace.experts[_ranges(trace.offsets[rows], length)].astype(np.int64)
    return offsets.astype(np.int64), picks


def _ranges(start: npt.NDArray[Any], length: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """start[0], start[0] + 1, ... (length[0] of them), start[1], ..."""
    ends = np.cumsum(length)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - length, length)
    return np.asarray(np.repeat(start, length) + within, np.int64)
