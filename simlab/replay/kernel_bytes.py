"""The kernel of pools that are counted in bytes (``bmoe``); part of each generated module.

What follows the mark below is appended to kernel.py's text there, hence the imports above it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simlab.policy.jit import cached_jit, kernel_jit
from simlab.replay.default_hooks import (
    admit,
    on_evict,
    on_hit,
    on_insert,
    on_miss,
    on_set,
    on_step,
    victim,
)
from simlab.replay.kernel import DECLINED, HIT, IN_PRESENT_SET, NOT_RESIDENT, UPLOADED

# simlab: appended


@kernel_jit
def _plan_batch(
    state: Any,
    cache: Any,
    group: Any,
    layer: int,
    experts: Any,
    outcome: Any,
    fills: Any,
    protect: bool,
    layer_bytes: Any,
    pool: Any,
) -> Any:
    """Serve one batch under the ``bmoe`` semantics: insert every miss, then evict to the budget.

    Args:
        experts: integer [n], distinct experts in the order of their last picks.
        layer_bytes: int64 [layers of the group], bytes of one expert.
        pool: int64 [3]: budget in bytes, bytes used, peak of bytes used (the last two updated).
        The others as in _plan_set; fills hold no victim.

    Returns:
        As _plan_set.
    """
    base = layer * group.experts
    n = experts.shape[0]
    now = cache.now[0] + 1
    cache.now[0] = now
    for i in range(n):
        cache.stamp[np.uint32(base + experts[i])] = now
    on_set(state, cache, group, layer, experts)
    n_fill = 0
    for i in range(n):
        key = np.uint32(base + experts[i])
        if cache.slot_of[key] >= 0:
            outcome[i] = HIT
            on_hit(state, cache, group, key)
            continue
        on_miss(state, cache, group, key)
        if not admit(state, cache, group, key, -1):
            outcome[i] = DECLINED
            continue
        cache.n_free[0] -= 1
        slot = cache.free[cache.n_free[0]]
        cache.slot_of[key] = slot
        cache.key_of[slot] = key
        pool[1] += layer_bytes[layer]
        on_insert(state, cache, group, key)
        outcome[i] = UPLOADED
        fills[n_fill, 0] = experts[i]
        fills[n_fill, 1] = slot
        fills[n_fill, 2] = -1
        n_fill += 1
    pool[2] = max(pool[2], pool[1])
    residents = group.keys - cache.n_free[0]
    present = 0
    if protect:
        for i in range(n):
            if cache.slot_of[np.uint32(base + experts[i])] >= 0:
                present += 1
    while pool[1] > pool[0] and residents > present:
        out = victim(state, cache, group, -1)
        if out < 0 or out >= group.keys or cache.slot_of[out] < 0:
            fills[0, 0] = out
            return NOT_RESIDENT
        if protect and cache.stamp[out] == now:
            fills[0, 0] = out
            return IN_PRESENT_SET
        gone = np.uint32(out)
        slot = cache.slot_of[gone]
        cache.slot_of[gone] = -1
        cache.key_of[slot] = -1
        cache.free[cache.n_free[0]] = slot
        cache.n_free[0] += 1
        pool[1] -= layer_bytes[out // group.experts]
        residents -= 1
        on_evict(state, cache, group, gone)
    return n_fill


@cached_jit(nogil=True, _nrt=False)
def replay_batches(
    state: Any,
    cache: Any,
    group: Any,
    first: int,
    last: int,
    set_step: Any,
    set_layer: Any,
    offsets: Any,
    experts: Any,
    next_use: Any,
    step_tokens: Any,
    layer_bytes: Any,
    pool: Any,
    protect: bool,
    outcome: Any,
    runs: Any,
    fills: Any,
) -> int:
    """Replay access sets ``first`` up to ``last`` under the ``bmoe`` semantics: no gate.

    Arguments as in ``replay`` and ``_plan_batch``; access sets in the order of last picks.
    """
    step_now = -1
    for s in range(first, last):
        layer = np.int64(set_layer[s])
        begin = offsets[s]
        end = offsets[s + 1]
        if set_step[s] != step_now:
            step_now = set_step[s]
            on_step(state, cache, group, step_tokens[step_now])
        if next_use.shape[0] > 0:
            for i in range(begin, end):
                cache.next_use[layer * group.experts + experts[i]] = next_use[i]
        n_fill = _plan_batch(
            state,
            cache,
            group,
            layer,
            experts[begin:end],
            outcome[begin:end],
            fills,
            protect,
            layer_bytes,
            pool,
        )
        if n_fill < 0:
            fills[0, 1] = n_fill
            return s
        runs[s] = n_fill  # a pool of bytes has no slots in which neighbours could merge
    return -1
