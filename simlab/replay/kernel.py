"""The generic kernel: the same loops for every policy, compiled once per policy by ``compile.py``.

The text of this file, and those of kernel_resize.py, kernel_bytes.py and kernel_layer.py behind it,
is the text of each generated module; only the line that imports the hooks differs, so that numba
compiles the policy's own functions into these loops. Keep it free of closures and of Python
objects: arrays, numbers and NamedTuples of both are all it may touch.

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
NO_SUCH_EXPERT = -3  # plan_layer only: a pick outside the layer

# What an access set is to `replay`: served whole, pick by pick, or in waves that fit the pool.
WHOLE_SET = 0
PER_PICK = 1
WAVES = 2


@kernel_jit
def _serve_miss(
    state: Any,
    cache: Any,
    group: Any,
    base: int,
    key: Any,
    fills: Any,
    n_fill: int,
    protect: bool,
) -> Any:
    """Give a missing key a slot if the policy wants it to have one.

    Returns:
        UPLOADED with (expert, slot, victim key or -1) in fills[n_fill], DECLINED, or NOT_RESIDENT /
        IN_PRESENT_SET with the bad key in fills[0, 0].
    """
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
    at = np.uint64(n_fill)
    fills[at, 0] = key - base
    fills[at, 1] = slot
    fills[at, 2] = out
    return UPLOADED


@kernel_jit
def _goes_on(fills: Any, i: int) -> bool:
    """Fill i merges with the one before it: consecutive in expert id and in slot."""
    return i > 0 and fills[i, 0] == fills[i - 1, 0] + 1 and fills[i, 1] == fills[i - 1, 1] + 1


@kernel_jit
def _plan_pick(
    state: Any,
    cache: Any,
    group: Any,
    layer: int,
    experts: Any,
    at: int,
    fills: Any,
    protect: bool,
) -> Any:
    """Serve an access set of one member, experts[at]; returns its outcome, or an error as
    _serve_miss does.
    """
    base = layer * group.experts
    key = np.uint32(base + experts[np.uint64(at)])
    cache.now[0] += 1
    cache.stamp[key] = cache.now[0]
    on_set(state, cache, group, layer, experts[at : at + 1])
    if cache.slot_of[key] >= 0:
        on_hit(state, cache, group, key)
        return HIT
    return _serve_miss(state, cache, group, base, key, fills, 0, protect)


@kernel_jit
def _plan_set(
    state: Any,
    cache: Any,
    group: Any,
    layer: int,
    experts: Any,
    begin: int,
    end: int,
    outcome: Any,
    fills: Any,
    order: Any,
    protect: bool,
) -> Any:
    """Serve one access set of one layer from the pool; engines with a fixed number of slots.

    Args:
        state: the policy's NamedTuple.
        cache: simlab.policy.protocol.Cache.
        group: simlab.policy.protocol.Group.
        layer: index of the layer in its group.
        experts: integer; experts[begin:end] is the set, distinct, in first-seen order.
        outcome: uint8, written from begin to end: UPLOADED, HIT or DECLINED per member.
        fills: int32 [>= n, 3], written: (expert, slot, victim key or -1) per upload, in ascending
            expert id.
        order: uint32 [>= n], scratch.
        protect: refuse a victim of the present set (False only for the bypassing bound).

    Returns:
        The number of fills and that of merged upload runs, or NOT_RESIDENT / IN_PRESENT_SET twice
        with the bad key in fills[0, 0].
    """
    base = layer * group.experts
    n = end - begin
    now = cache.now[0] + 1
    cache.now[0] = now
    # The keys in the order of service: hits from the front as they come, the missing ones from the
    # back. Without a branch on what is a hit, since no processor could foresee it: each key is
    # written to both places, and the next one overwrites the wrong one.
    n_hit = 0
    for i in range(n):
        key = np.uint32(base + experts[np.uint64(begin + i)])
        cache.stamp[key] = now
        hit = cache.slot_of[key] >= 0
        outcome[np.uint64(begin + i)] = HIT if hit else UPLOADED
        order[np.uint64(n_hit)] = key
        order[np.uint64(n_hit + (n - 1 - i))] = key
        n_hit += hit
    on_set(state, cache, group, layer, experts[begin:end])
    # the missing ones in ascending expert id: sets are small, so insert in place
    for m in range(n_hit + 1, n):
        larger = order[np.uint64(m)]
        for j in range(n_hit, m):
            other = order[np.uint64(j)]
            order[np.uint64(j)] = min(other, larger)
            larger = max(other, larger)
        order[np.uint64(m)] = larger
    n_fill = 0
    n_run = 0
    # one loop for both, so that its length can be foreseen
    for i in range(n):
        key = order[np.uint64(i)]
        if i < n_hit:
            on_hit(state, cache, group, key)
            continue
        code = _serve_miss(state, cache, group, base, key, fills, n_fill, protect)
        if code == UPLOADED:
            n_run += not _goes_on(fills, n_fill)
            n_fill += 1
        elif code == DECLINED:
            for j in range(begin, end):
                if np.uint32(base + experts[np.uint64(j)]) == key:
                    outcome[np.uint64(j)] = DECLINED
        else:
            return code, code
    return n_fill, n_run


@kernel_jit
def _plan_waves(
    state: Any,
    cache: Any,
    group: Any,
    layer: int,
    experts: Any,
    begin: int,
    end: int,
    outcome: Any,
    fills: Any,
    order: Any,
    protect: bool,
    line: Any,
    place: Any,
    line_outcome: Any,
) -> Any:
    """Serve one access set under the ``sglang`` semantics: in waves of at most the pool's slots.

    Resident members come first, in first-seen order, then the missing ones in ascending expert id;
    this order is cut into waves, and each wave is served as an access set of its own.

    Args:
        line, place, line_outcome: uint16, int32 and uint8 [>= n], scratch.
        The others as in _plan_set; fills hold those of the last wave.

    Returns:
        The number of fills of all waves, or an error as _plan_set does.
    """
    if end - begin <= group.slots:
        n_fill, _ = _plan_set(
            state, cache, group, layer, experts, begin, end, outcome, fills, order, protect
        )
        return n_fill
    base = layer * group.experts
    first_missing = 0
    for i in range(begin, end):
        if cache.slot_of[np.uint32(base + experts[i])] >= 0:
            line[first_missing] = experts[i]
            place[first_missing] = i
            first_missing += 1
    n = first_missing
    for i in range(begin, end):
        expert = experts[i]
        if cache.slot_of[np.uint32(base + expert)] < 0:
            j = n
            while j > first_missing and line[j - 1] > expert:
                line[j] = line[j - 1]
                place[j] = place[j - 1]
                j -= 1
            line[j] = expert
            place[j] = i
            n += 1
    n_fill = 0
    for first in range(0, n, group.slots):
        until = min(first + group.slots, n)
        code, _ = _plan_set(
            state, cache, group, layer, line, first, until, line_outcome, fills, order, protect
        )
        if code < 0:
            return code
        n_fill += code
    for j in range(n):
        outcome[place[j]] = line_outcome[j]
    return n_fill


@kernel_jit
def _fill_at_start(state: Any, cache: Any, group: Any) -> None:
    """The first experts are resident from the start (``sglang``: a pool serves one layer)."""
    for expert in range(min(group.slots, group.experts)):
        key = np.uint32(expert)
        cache.n_free[0] -= 1
        slot = cache.free[cache.n_free[0]]
        cache.slot_of[key] = slot
        cache.key_of[slot] = key
        on_insert(state, cache, group, key)


@kernel_jit
def _takes_large_path(group: Any, tokens: int, gate_tokens: int) -> bool:
    """The gate: a step of so many tokens only reads the group's pool."""
    return group.slots == 0 or (
        gate_tokens > 0
        and (tokens > gate_tokens or min(tokens * group.k, group.experts) > group.slots)
    )


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
    order: Any,
    line: Any,
    place: Any,
    line_outcome: Any,
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
        unit: WHOLE_SET, PER_PICK or WAVES (the pool then starts with its first experts).
        gate_tokens: most tokens of a step on the cached path (0: no gate).
        protect: as in _plan_set.
        outcome: uint8 [lookups], written.
        runs: int64 [sets], written: merged upload runs of the set.
        fills: int32 [largest set, 3] and order: uint32 [largest set], scratch.
        line, place, line_outcome: as in _plan_waves.

    Returns:
        -1 when all went well, else the set at which the policy broke the protocol, with
        (key, code) in fills[0, :2].
    """
    step_now = -1
    large = False
    if unit == WAVES and first == 0:
        _fill_at_start(state, cache, group)
    for s in range(first, last):
        layer = np.int64(index_in_group[np.uint64(set_layer[np.uint64(s)])])
        if layer < 0:
            continue
        begin = offsets[np.uint64(s)]
        end = offsets[np.uint64(s + 1)]
        step = set_step[np.uint64(s)]
        base = layer * group.experts
        if step != step_now:
            step_now = step
            tokens = step_tokens[step]
            large = _takes_large_path(group, tokens, gate_tokens)
            if not large:
                on_step(state, cache, group, tokens)
        if large:
            for i in range(begin, end):
                if cache.slot_of[np.uint32(base + experts[i])] >= 0:
                    outcome[i] = LARGE_HIT
                else:
                    outcome[i] = LARGE_STREAMED
            continue
        if unit == PER_PICK:
            n_run = 0
            for i in range(begin, end):
                if next_use.shape[0] > 0:
                    cache.next_use[np.uint32(base + experts[i])] = next_use[i]
                if weights.shape[0] > 0:
                    cache.weight[np.uint32(base + experts[i])] = weights[i]
                code = _plan_pick(state, cache, group, layer, experts, i, fills, protect)
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
            if unit == WAVES:
                n_fill = _plan_waves(
                    state, cache, group, layer, experts, begin, end, outcome, fills, order,
                    protect, line, place, line_outcome,
                )  # fmt: skip
                n_run = n_fill  # each expert is copied by itself
            else:
                n_fill, n_run = _plan_set(
                    state, cache, group, layer, experts, begin, end, outcome, fills, order,
                    protect,
                )  # fmt: skip
            if n_fill < 0:
                fills[0, 1] = n_fill
                return s
        runs[np.uint64(s)] = n_run
    return -1
