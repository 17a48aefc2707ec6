"""Experts that are pinned: resident beside a pool, never evicted, never looked up in it.

A pinned expert takes a slot's room, so a pool with pins has so many slots less: sizes compare at
equal memory. Which experts are pinned is told by the picks of a trace; if it is the replayed trace
itself, that is hindsight, and the results say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from simlab.errors import UsageError
from simlab.replay.access import Access
from simlab.trace.schema import DECODE, Trace


def most_picked(trace: Trace, layers: Sequence[int], count: int) -> npt.NDArray[np.bool_]:
    """The ``count`` most picked experts of each layer: bool [layers, experts].

    Decode rows count, or all rows of a trace without any; of equals the lowest id is taken.

    Raises:
        UsageError: a layer has not so many experts, or no row in the trace.
    """
    n_expert = trace.meta.n_expert
    if not 1 <= count < n_expert:
        raise UsageError(f"--pin takes 1 to {n_expert - 1} experts of a layer, not {count}")
    rows = trace.phase == DECODE
    if not rows.any():
        rows = np.ones(trace.n_rows, np.bool_)
    sizes = np.diff(trace.offsets)
    of_pick = np.repeat(np.where(rows, trace.layer, -1), sizes)
    pinned = np.zeros((len(layers), n_expert), np.bool_)
    for i, layer in enumerate(layers):
        picks = np.bincount(trace.experts[of_pick == layer], minlength=n_expert)
        if not picks.any():
            raise UsageError(f"the picks that choose the pinned experts have none of layer {layer}")
        pinned[i, np.argsort(-picks, kind="stable")[:count]] = True
    return pinned


def lookups_of(access: Access, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which lookups are of a masked (layer, expert): bool [lookups]."""
    layer = np.repeat(access.set_layer, np.diff(access.offsets))
    result: npt.NDArray[np.bool_] = mask[layer, access.experts]
    return result


def without(access: Access, gone: npt.NDArray[np.bool_]) -> Access:
    """The access sets less some lookups; sets that lose all of them stay, empty."""
    left = np.add.accumulate(np.concatenate(([0], ~gone)), dtype=np.int64)
    return replace(access, offsets=left[access.offsets], experts=access.experts[~gone])
