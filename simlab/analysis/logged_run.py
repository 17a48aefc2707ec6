"""A trace replayed as the engine of a log ran: LRU, its slots, counters as it prints them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from simlab.model.budget import MIB
from simlab.model.placement import Placement
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.kernel import LARGE_HIT
from simlab.replay.row import result_row
from simlab.replay.run import Replayer
from simlab.result.schema import Counters
from simlab.trace.read import read_trace


def replay_logged(
    trace: str | os.PathLike[str],
    placement: Placement,
    slots: Sequence[int],
    *,
    concurrency: int,
    ubatch: int,
    n_expert: int | None,
) -> tuple[dict[str, Counters], tuple[int, float]]:
    """Replay; returns the counters per class, and what large batches copy on the device.

    llama.cpp counts the copies of large batches once for each of an expert's tensors.
    """
    layout = placement.layout
    replayer = Replayer(read_trace(trace, n_expert=n_expert), layout=layout, ubatch=ubatch)
    cell = Cell(load_policy("lru"), tuple(slots), None, concurrency)
    started = time.time()
    outcomes = replayer.outcomes(cell)
    result = result_row(replayer, cell, outcomes, started)
    sets = np.repeat(outcomes.access.set_layer, np.diff(outcomes.access.offsets))
    resident = np.bincount(
        sets[outcomes.outcome == LARGE_HIT], minlength=len(replayer.trace.meta.moe_layers)
    )
    n, mib = 0, 0.0
    for group in layout.groups:
        for layer in group.layers:
            count = int(resident[replayer.trace.meta.moe_layers.index(layer)])
            n += count * len(group.tensor_bytes)
            mib += count * sum(group.tensor_bytes) / MIB
    return dict(result.by_class), (n, mib)
