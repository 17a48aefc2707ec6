"""The generic kernel: the same loops for every policy, compiled once per policy by ``compile.py``.

The text of this file is the text of each generated module; only the line that imports the hooks
differs, so that numba compiles the policy's own functions into these loops. Keep it free of
closures and of Python objects: arrays, numbers and NamedTuples of both are all it may touch.

Source of the order of events: ``moe_cache_lru::plan`` in llama.cpp's src/llama-moe-cache.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simlab.policy.jit import cached_jit, kernel_jit
from simlab.replay.default_hooks import (  # simlab: hooks
    admit,
    on_evict,
    on_hit,
    on_insert,
    on_miss,
    on_set,
    on_step,
    victim,
)

# What became of a lookup; one byte each in the ``outcome`` array.
UPLOADED = 0  # a miss that filled a slot
HIT = 1
DECLINED = 2  # a miss that filled no slot
LARGE_HIT = 3  # large path: resident, copied on the device
LARGE_STREAMED = 4  # large path: not resident, copied once and dropped

# What stops a run: returned in place of a count.
NOT_RESIDENT = -1
IN_PRESENT_SET = -2

# What an access set is to `replay`: served whole, or pick by pick.
WHOLE_SET = 0
PER_PICK = 1


@kernel_jit
def _serve_miss(
    state: Any,
    cache: Any,
    group: Any,
    base: int,
    expert: int,
    fills: Any,
    n_fill: int,
    protect: bool,
) -> Any:
    """Give a missing key a slot if the policy wants it to have one.

    Returns:
        UPLOADED with (expert, slot, victim key or -1) in fills[n_fill], DECLINED, or NOT_RESIDENT /
        IN_PRESENT_SET with the bad key in fills[0, 0].
    """
    key = np.uint32(base + expert)
    on_miss(state, cache, group, key)
    out = -1
    if cache.n_free[0] == 0:
        out = victim(state, cache, group, key)
        if out < 0 or out >= group.keys or cache.slot_of[out] < 0:
            fills[0, 0] = out
            return NOT_RESIDENT
        if protect and cache.stamp[out] == cache.now[0]:
            fills[0, 0] = out
            return IN_PRESENT_SET
    if not admit(state, cache, group, key, out):
        return DECLINED
    if out >= 0:
        gone = np.uint32(out)
        slot = cache.slot_of[gone]
        cache.slot_of[gone] = -1
        on_evict(state, cache, group, gone)
    else:
        cache.n_free[0] -= 1
        slot = cache.free[cache.n_free[0]]
    cache.slot_of[key] = slot
    cache.key_of[slot] = key
    on_insert(state, cache, group, key)
    fills[n_fill, 0] = expert
    fills[n_fill, 1] = slot
    fills[n_fill, 2] = out
    return UPLOADED


@kernel_jit
def _plan_pick(
    state: Any, cache: Any, group: Any, layer: int, experts: Any, fills: Any, protect: bool
) -> Any:
    """Serve an access set of one member; returns its outcome, or an error as _serve_miss does."""
    base = layer * group.experts
    key = np.uint32(base + experts[0])
    cache.now[0] += 1
    cache.stamp[key] = cache.now[0]
    on_set(state, cache, group, layer, experts)
    if cache.slot_of[key] >= 0:
        on_hit(state, cache, group, key)
        return HIT
    return _serve_miss(state, cache, group, base, experts[0], fills, 0, protect)


@kernel_jit
def _plan_set(
    state: Any,
    cache: Any,
    group: Any,
    layer: int,
    experts: Any,
    outcome: Any,
    fills: Any,
    protect: bool,
) -> Any:
    """Serve one access set of one layer from the pool; engines with a fixed number of slots.

    Args:
        state: the policy's NamedTuple.
        cache: simlab.policy.protocol.Cache.
        group: simlab.policy.protocol.Group.
        layer: index of the layer in its group.
        experts: integer [n], distinct experts in first-seen order.
        outcome: uint8 [>= n], written: UPLOADED, HIT or DECLINED per member.
        fills: int32 [>= n, 3], written: (expert, slot, victim key or -1) per upload, in ascending
            expert id.
        protect: refuse a victim of the present set (False only for the bypassing bound).

    Returns:
        The number of fills, or NOT_RESIDENT / IN_PRESENT_SET with the bad key in fills[0, 0].
    """
    base = layer * group.experts
    n = experts.shape[0]
    now = cache.now[0] + 1
    cache.now[0] = now
    for i in range(n):
        cache.stamp[np.uint32(base + experts[i])] = now
    on_set(state, cache, group, layer, experts)
    n_miss = 0
    for i in range(n):
        expert = experts[i]
        key = np.uint32(base + expert)
        if cache.slot_of[key] >= 0:
            outcome[i] = HIT
            on_hit(state, cache, group, key)
        else:
            # keep the missing ones in ascending expert id: sets are small, so insert in place
            j = n_miss
            while j > 0 and fills[j - 1, 0] > expert:
                fills[j, 0] = fills[j - 1, 0]
                fills[j, 1] = fills[j - 1, 1]
                j -= 1
            fills[j, 0] = expert
            fills[j, 1] = i
            n_miss += 1
    n_fill = 0
    for m in range(n_miss):
        expert = fills[m, 0]
        i = fills[m, 1]
        code = _serve_miss(state, cache, group, base, expert, fills, n_fill, protect)
        if code < 0:
            return code
        outcome[i] = code
        n_fill += code == UPLOADED
    return n_fill


@cached_jit(_nrt=False)
def plan_set(
    state: Any,
    cache: Any,
    group: Any,
    layer: int,
    experts: Any,
    outcome: Any,
    fills: Any,
    protect: bool,
) -> Any:
    """Serve one access set, called from Python layer by layer; arguments as in _plan_set."""
    return _plan_set(state, cache, group, layer, experts, outcome, fills, protect)


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


@kernel_jit
def merged_runs(fills: Any, n_fill: int) -> int:
    """Uploads left after merging neighbours: consecutive in expert id and in slot."""
    runs = 0
    for i in range(n_fill):
        if i == 0 or fills[i, 0] != fills[i - 1, 0] + 1 or fills[i, 1] != fills[i - 1, 1] + 1:
            runs += 1
    return runs


@cached_jit(nogil=True, _nrt=False)
def replay(
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
    weights: Any,
    step_tokens: Any,
    index_in_group: Any,
    unit: int,
    gate_tokens: int,
    protect: bool,
    outcome: Any,
    runs: Any,
    fills: Any,
) -> int:
    """Replay access sets ``first`` up to ``last`` of one group; other groups' sets are skipped.

    ``first`` begins a step: on_step is called anew.

    Args:
        state, cache, group: as in _plan_set.
        set_step: int32 [sets], step of each access set, ascending.
        set_layer: int16 [sets], index into the trace's MoE layers.
        offsets: int64 [sets + 1]; experts[offsets[s]:offsets[s + 1]] is access set s.
        experts: uint16 [lookups].
        next_use: int32 [lookups] or length 0.
        weights: float32 [lookups], router weights, or length 0.
        step_tokens: int32 [steps], tokens computed together.
        index_in_group: int32 [MoE layers], index of the layer in this group or -1.
        unit: WHOLE_SET or PER_PICK.
        gate_tokens: most tokens of a step on the cached path (0: no gate).
        protect: as in _plan_set.
        outcome: uint8 [lookups], written.
        runs: int64 [sets], written: merged upload runs of the set.
        fills: int32 [largest set, 3], scratch.

    Returns:
        -1 when all went well, else the set at which the policy broke the protocol, with
        (key, code) in fills[0, :2].
    """
    step_now = -1
    for s in range(first, last):
        layer = index_in_group[set_layer[s]]
        if layer < 0:
            continue
        begin = offsets[s]
        end = offsets[s + 1]
        step = set_step[s]
        tokens = step_tokens[step]
        base = layer * group.experts
        if group.slots == 0 or (
            gate_tokens > 0
            and (tokens > gate_tokens or min(tokens * group.k, group.experts) > group.slots)
        ):
            for i in range(begin, end):
                if cache.slot_of[np.uint32(base + experts[i])] >= 0:
                    outcome[i] = LARGE_HIT
                else:
                    outcome[i] = LARGE_STREAMED
            continue
        if step != step_now:
            step_now = step
            on_step(state, cache, group, tokens)
        if unit == PER_PICK:
            n_run = 0
            for i in range(begin, end):
                if next_use.shape[0] > 0:
                    cache.next_use[np.uint32(base + experts[i])] = next_use[i]
                if weights.shape[0] > 0:
                    cache.weight[np.uint32(base + experts[i])] = weights[i]
                code = _plan_pick(state, cache, group, layer, experts[i : i + 1], fills, protect)
                if code < 0:
                    fills[0, 1] = code
                    return s
                outcome[i] = code
                n_run += code == UPLOADED
        else:
            if next_use.shape[0] > 0:
                for i in range(begin, end):
                    cache.next_use[np.uint32(base + experts[i])] = next_use[i]
            if weights.shape[0] > 0:
                for i in range(begin, end):
                    cache.weight[np.uint32(base + experts[i])] = weights[i]
            n_fill = _plan_set(
                state, cache, group, layer, experts[begin:end], outcome[begin:end], fills, protect
            )
            if n_fill < 0:
                fills[0, 1] = n_fill
                return s
            n_run = merged_runs(fills, n_fill)
        runs[s] = n_run
    return -1


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
    weights: Any,
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
        if weights.shape[0] > 0:
            for i in range(begin, end):
                cache.weight[layer * group.experts + experts[i]] = weights[i]
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
