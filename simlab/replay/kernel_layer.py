"""The kernel one layer at a time, for live engines; part of each generated module.

What follows the mark below is appended to kernel.py's text there, hence the imports above it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simlab.policy.jit import cached_jit
from simlab.replay.default_hooks import on_step
from simlab.replay.kernel import (
    LARGE_HIT,
    LARGE_STREAMED,
    NO_SUCH_EXPERT,
    _goes_on,
    _plan_set,
    _takes_large_path,
)

# simlab: appended


@cached_jit(_nrt=False)
def plan_layer(
    state: Any,
    cache: Any,
    group: Any,
    layer: int,
    tokens: int,
    begins: bool,
    gate_tokens: int,
    protect: bool,
    picks: Any,
    seen: Any,
    experts: Any,
    outcome: Any,
    slots: Any,
    fills: Any,
    order: Any,
    runs: Any,
    counts: Any,
) -> Any:
    """Serve one layer of one step; what a live engine calls, with nothing but what it knows then.

    The gate, on_step and the access set are those of ``replay``.

    Args:
        state, cache, group, layer, protect: as in _plan_set.
        tokens: tokens of the step; gate_tokens: as in ``replay``.
        begins: this is the step's first layer in the group.
        picks: int64 [n], experts picked by the step's tokens in lane order, repeats and all.
        seen: int64 [experts of a layer + 1], scratch; zeros before the first call.
        experts: uint16, written: the distinct picks, m of them, in first-seen order.
        outcome: uint8, written: what became of each, codes as in ``replay``.
        slots: int64, written: the slot of each, -1 without one.
        fills: int32 [.., 3], written as in _plan_set.
        order: uint32, scratch.
        runs: int32 [.., 3], written: merged uploads as (first expert, first slot, how many).
        counts: int64 [3], written: m, fills, runs. All but seen and counts hold n_expert entries.

    Returns:
        0, or NOT_RESIDENT / IN_PRESENT_SET with the bad key in fills[0, 0], or NO_SUCH_EXPERT with
        the bad pick in counts[0].
    """
    base = layer * group.experts
    now = seen[group.experts] + 1
    seen[group.experts] = now
    n = 0
    for pick in picks:
        if pick < 0 or pick >= group.experts:
            counts[0] = pick
            return NO_SUCH_EXPERT
        if seen[pick] != now:
            seen[pick] = now
            experts[n] = pick
            n += 1
    counts[0] = n
    counts[1] = 0
    counts[2] = 0
    if _takes_large_path(group, tokens, gate_tokens):
        for i in range(n):
            slots[i] = cache.slot_of[np.uint32(base + experts[i])]
            outcome[i] = LARGE_HIT if slots[i] >= 0 else LARGE_STREAMED
        return 0
    if begins:
        on_step(state, cache, group, tokens)
    n_fill, _ = _plan_set(state, cache, group, layer, experts, 0, n, outcome, fills, order, protect)
    if n_fill < 0:
        return n_fill
    for i in range(n):
        slots[i] = cache.slot_of[np.uint32(base + experts[i])]
    n_run = 0
    for i in range(n_fill):
        if _goes_on(fills, i):
            runs[n_run - 1, 2] += 1
        else:
            runs[n_run, 0] = fills[i, 0]
            runs[n_run, 1] = fills[i, 1]
            runs[n_run, 2] = 1
            n_run += 1
    counts[1] = n_fill
    counts[2] = n_run
    return 0
