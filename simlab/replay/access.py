"""Access sets: what each layer of each step asks of the cache, shared by all policies and sizes.

One access set per (step, layer with at least one row): the distinct experts picked by the tokens of
the step, in the order that the semantics asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import cached_jit
from simlab.replay.schedule import Schedule, Tokens, build_schedule, tokens_of
from simlab.trace.schema import PREFILL, Trace

FIRST_SEEN = 0  # distinct experts, lane order then router order
LAST_PICKED = 1  # distinct experts by their last pick
EVERY_PICK = 2  # all picks, each row in ascending expert id; prefill token by token


@dataclass(frozen=True, eq=False)
class Access:
    """The access sets of a run. M sets, P lookups.

    Attributes:
        order: FIRST_SEEN, LAST_PICKED or EVERY_PICK.
        set_step: int32 [M], ascending. set_layer: int16 [M], index into the trace's MoE layers.
        offsets: int64 [M + 1]. experts: uint16 [P].
        step_tokens: int32 [S], tokens of each step. step_phase: uint8 [S].
        largest: most lookups of a set.
        schedule, tokens: what the sets were made from; with EVERY_PICK the schedule has its prefill
            steps cut into single tokens.
        layer_index: int16 [R], each trace row's layer as an index into the MoE layers.
    """

    order: int
    set_step: npt.NDArray[np.int32]
    set_layer: npt.NDArray[np.int16]
    offsets: npt.NDArray[np.int64]
    experts: npt.NDArray[np.uint16]
    step_tokens: npt.NDArray[np.int32]
    step_phase: npt.NDArray[np.uint8]
    largest: int
    schedule: Schedule
    tokens: Tokens
    layer_index: npt.NDArray[np.int16]


def build_access(trace: Trace, tokens: Tokens, schedule: Schedule, order: int) -> Access:
    """Gather, per step and layer, the picks of all tokens and order them."""
    if order == EVERY_PICK:
        schedule = _token_by_token(schedule)
    layers = np.asarray(trace.meta.moe_layers)
    layer_index = np.searchsorted(layers, trace.layer).astype(np.int16)
    set_step, set_layer, offsets, experts = _gather(
        frozen(schedule.offsets),
        frozen(schedule.token),
        frozen(tokens.row_start),
        frozen(layer_index),
        frozen(trace.offsets),
        frozen(trace.experts),
        trace.meta.n_expert,
        len(layers),
        order,
    )
    return Access(
        order=order,
        set_step=set_step,
        set_layer=set_layer,
        offsets=offsets,
        experts=experts,
        step_tokens=np.diff(schedule.offsets).astype(np.int32),
        step_phase=schedule.phase,
        largest=int(np.diff(offsets).max(initial=0)),
        schedule=schedule,
        tokens=tokens,
        layer_index=layer_index,
    )


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view: memory-mapped and fresh arrays then share one compiled signature."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _token_by_token(schedule: Schedule) -> Schedule:
    """Prefill steps cut into single tokens: the trace's own order."""
    size = np.diff(schedule.offsets)
    pieces = np.where(schedule.phase == PREFILL, size, 1)
    new_size = np.repeat(np.where(schedule.phase == PREFILL, 1, size), pieces)
    return Schedule(
        offsets=np.concatenate(([0], np.cumsum(new_size))).astype(np.int64),
        token=schedule.token,
        phase=np.repeat(schedule.phase, pieces),
        busy_lanes=schedule.busy_lanes,
    )


def cycle_of(trace: Trace, concurrency: int = 1) -> tuple[int, int, int]:
    """Cycle T of decode steps: min, median and max of the distinct keys touched by one step, over
    all layers; without decode tokens every token counts as one.
    """
    tokens = tokens_of(trace)
    has_decode = bool((tokens.phase == 1).any())
    if not has_decode:
        tokens = Tokens(
            tokens.row_start, tokens.request, np.ones_like(tokens.phase), tokens.request_ids
        )
    schedule = build_schedule(trace, tokens, concurrency=concurrency, prefill="skip")
    access = build_access(trace, tokens, schedule, FIRST_SEEN)
    return cycle(access, np.ones(len(trace.meta.moe_layers), np.bool_))


def cycle(access: Access, layers: npt.NDArray[np.bool_]) -> tuple[int, int, int]:
    """Min, median and max of the lookups of one decode step (of any step when there is none).

    Args:
        layers: bool [MoE layers], which layers count (those of one group).
    """
    counted = layers[access.set_layer]
    keys = np.bincount(
        access.set_step[counted],
        weights=np.diff(access.offsets)[counted],
        minlength=len(access.step_phase),
    )
    decode = keys[access.step_phase != PREFILL]
    keys = decode if len(decode) else keys
    if len(keys) == 0:
        return 0, 0, 0
    return int(keys.min()), int(np.median(keys)), int(keys.max())


@cached_jit()
def _gather(
    step_offsets: Any,
    step_token: Any,
    row_start: Any,
    layer_index: Any,
    pick_offsets: Any,
    picks: Any,
    n_expert: int,
    n_layers: int,
    order: int,
) -> Any:
    total_rows = 0
    total_picks = 0
    for t in step_token:
        total_rows += row_start[t + 1] - row_start[t]
        total_picks += pick_offsets[row_start[t + 1]] - pick_offsets[row_start[t]]
    set_step = np.empty(total_rows, np.int32)
    set_layer = np.empty(total_rows, np.int16)
    offsets = np.empty(total_rows + 1, np.int64)
    experts = np.empty(total_picks, np.uint16)
    seen = np.full(n_expert, -1, np.int64)  # the set in which an expert was last met
    longest = 0
    for s in range(len(step_offsets) - 1):
        longest = max(longest, step_offsets[s + 1] - step_offsets[s])
    row = np.empty(longest, np.int64)  # next row of each token of the step
    n_sets = 0
    n = 0
    offsets[0] = 0
    for s in range(len(step_offsets) - 1):
        begin = step_offsets[s]
        count = step_offsets[s + 1] - begin
        for i in range(count):
            row[i] = row_start[step_token[begin + i]]
        for layer in range(n_layers):
            start = n
            if order == LAST_PICKED:
                # walk backwards, keep first meetings, then reverse
                for j in range(count):
                    i = count - 1 - j
                    r = row[i]
                    if r < row_start[step_token[begin + i] + 1] and layer_index[r] == layer:
                        row[i] = r + 1
                        for p in range(pick_offsets[r + 1] - 1, pick_offsets[r] - 1, -1):
                            if seen[picks[p]] != n_sets:
                                seen[picks[p]] = n_sets
                                experts[n] = picks[p]
                                n += 1
                experts[start:n] = experts[start:n][::-1].copy()
            else:
                for i in range(count):
                    r = row[i]
                    if r < row_start[step_token[begin + i] + 1] and layer_index[r] == layer:
                        row[i] = r + 1
                        row_begin = n
                        for p in range(pick_offsets[r], pick_offsets[r + 1]):
                            expert = picks[p]
                            if order == EVERY_PICK:
                                j = n
                                while j > row_begin and experts[j - 1] > expert:
                                    experts[j] = experts[j - 1]
                                    j -= 1
                                experts[j] = expert
                                n += 1
                            elif seen[expert] != n_sets:
                                seen[expert] = n_sets
                                experts[n] = expert
                                n += 1
            if n > start:
                set_step[n_sets] = s
                set_layer[n_sets] = layer
                n_sets += 1
                offsets[n_sets] = n
    return (
        set_step[:n_sets].copy(),
        set_layer[:n_sets].copy(),
        offsets[: n_sets + 1].copy(),
        experts[:n].copy(),
    )


@cached_jit()
def next_uses(
    set_layer: Any, offsets: Any, experts: Any, served: Any, index_in_group: Any, n_expert: int
) -> Any:
    """Position of each lookup's next use: int32 [lookups].

    Only sets with ``served`` (bool [M]: on the cached path) count; a key never used again gets
    lookups + key, key = index_in_group[layer] * n_expert + expert. Other groups' sets stay 0.
    """
    n = len(experts)
    n_layers = 0
    for i in index_in_group:
        n_layers = max(n_layers, i + 1)
    following = np.empty(n_layers * n_expert, np.int64)
    for key in range(len(following)):
        following[key] = n + key
    result = np.zeros(n, np.int32)
    for s in range(len(set_layer) - 1, -1, -1):
        layer = index_in_group[set_layer[s]]
        if layer < 0 or not served[s]:
            continue
        for i in range(offsets[s + 1] - 1, offsets[s] - 1, -1):
            key = layer * n_expert + experts[i]
            result[i] = following[key]
            following[key] = i
    return result
