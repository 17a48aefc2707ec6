"""From the levels of one pass to the counters of every size.

A pass tells of each lookup the least size that it hits in, its *level*. One walk counts lookups and
picks by level, phase, class, layer, request and window; sums over levels are then what account.py
counts of a single replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import cached_jit
from simlab.replay.access import EVERY_PICK, Access, frozen
from simlab.replay.account import (
    COLUMNS,
    N_WINDOWS,
    OUTCOME,
    PICK_HITS,
    PICKS,
    RUNS,
    Account,
    Tables,
    summed,
    windows_of_steps,
)
from simlab.replay.kernel import HIT, LARGE_HIT, LARGE_STREAMED, UPLOADED
from simlab.result.schema import CLASSES
from simlab.trace.schema import Trace

#: What is counted by level.
_CACHED, _LARGE, _PICKS = 0, 1, 2


class CurveAccount:
    """Counts by level of one pass over all pools; ``of`` sums them for one size.

    Args:
        levels: uint16 [lookups], indices into the sizes of the lookup's pool; the number of sizes
            where it misses in all.
        cached: bool [sets], on the cached path.
        pool_of_layer: int32 [MoE layers].
        n_levels: most sizes of a pool, plus 1.
    """

    def __init__(
        self,
        trace: Trace,
        access: Access,
        levels: npt.NDArray[np.uint16],
        cached: npt.NDArray[np.bool_],
        pool_of_layer: npt.NDArray[np.int32],
        n_levels: int,
    ) -> None:
        self.trace, self.access, self.pool_of_layer = trace, access, pool_of_layer
        tokens = access.step_tokens[access.set_step]
        set_class = np.where(~cached | (tokens > 32), 2, np.where(tokens > 8, 1, 0))
        self.step_class = np.zeros((len(access.step_tokens), len(CLASSES)), np.bool_)
        self.step_class[access.set_step, set_class] = True
        window_of = windows_of_steps(access)
        counted = _walk(
            frozen(access.schedule.offsets),
            frozen(access.schedule.token),
            frozen(access.tokens.row_start),
            frozen(access.tokens.request),
            frozen(access.layer_index),
            frozen(trace.offsets),
            frozen(trace.experts),
            access.set_step,
            access.set_layer,
            access.offsets,
            access.experts,
            frozen(access.step_phase),
            window_of,
            levels,
            cached,
            set_class.astype(np.int8),
            pool_of_layer,
            trace.meta.n_expert,
            len(access.tokens.request_ids),
            access.order == EVERY_PICK,
            min(N_WINDOWS, len(window_of)),
            n_levels,
        )
        # by level -> up to a level
        self._table, self._by_request, self._windows = (
            np.add.accumulate(part, axis=axis, out=part)
            for part, axis in zip(counted, (3, 2, 2), strict=True)
        )

    def of(
        self,
        level_of_pool: Sequence[int],
        layer_bytes: Sequence[int] | None,
        *,
        on_decline: str,
        parts: bool,
    ) -> Account:
        """The account of one size.

        Args:
            level_of_pool: index of its slots among the sizes of each pool. The others as in
                account.summed.
        """
        level = np.asarray(level_of_pool)
        of_layer = level[self.pool_of_layer]
        pools = np.arange(len(level))
        every_pick = self.access.order == EVERY_PICK
        return summed(
            self.trace,
            self.access,
            Tables(
                _columns(self._table, of_layer, every_pick),
                np.stack(
                    [
                        self._by_request[:, :, -1].sum(axis=1, dtype=np.int64),
                        self._by_request[:, pools, level].sum(axis=1, dtype=np.int64),
                    ],
                    axis=1,
                ),
                _columns(self._windows if parts else self._windows[:0], of_layer, every_pick),
            ),
            self.step_class,
            layer_bytes,
            on_decline=on_decline,
            uncached_layers=np.zeros(len(of_layer), np.bool_),
            runs_known=every_pick,
            parts=parts,
        )


def _columns(
    sums: npt.NDArray[Any], level_of_layer: npt.NDArray[np.int64], every_pick: bool
) -> npt.NDArray[np.int64]:
    """[..., layer, level, count] -> [..., layer, column] at one level of each layer."""
    layers = np.arange(len(level_of_layer))
    hits, all_ = sums[..., layers, level_of_layer, :], sums[..., -1, :]
    result = np.zeros((*hits.shape[:-1], COLUMNS), np.int64)
    result[..., PICKS] = all_[..., _PICKS]
    result[..., PICK_HITS] = hits[..., _PICKS]
    result[..., OUTCOME + HIT] = hits[..., _CACHED]
    result[..., OUTCOME + UPLOADED] = all_[..., _CACHED] - hits[..., _CACHED]
    result[..., OUTCOME + LARGE_HIT] = hits[..., _LARGE]
    result[..., OUTCOME + LARGE_STREAMED] = all_[..., _LARGE] - hits[..., _LARGE]
    if every_pick:  # each pick is copied by itself
        result[..., RUNS] = result[..., OUTCOME + UPLOADED]
    return result


@cached_jit(nogil=True)
def _walk(
    step_offsets: Any,
    step_token: Any,
    row_start: Any,
    request: Any,
    layer_index: Any,
    pick_offsets: Any,
    picks: Any,
    set_step: Any,
    set_layer: Any,
    set_offsets: Any,
    experts: Any,
    step_phase: Any,
    window_of: Any,
    levels: Any,
    cached: Any,
    set_class: Any,
    pool_of_layer: Any,
    n_expert: int,
    n_requests: int,
    every_pick: bool,
    n_windows: int,
    n_levels: int,
) -> Any:
    """Returns table int64 [phase, class, layer, level, count], by_request int64 [requests, pool,
    level] (picks) and windows int64 [windows, layer, level, count].
    """
    n_layers = len(pool_of_layer)
    n_pools = 0
    for pool in pool_of_layer:
        n_pools = max(n_pools, pool + 1)
    table = np.zeros((2, 3, n_layers, n_levels, 3), np.int64)
    by_request = np.zeros((n_requests, n_pools, n_levels), np.int64)
    windows = np.zeros((n_windows, n_layers, n_levels, 3), np.int64)
    level_of = np.zeros(n_expert, np.uint16)  # of an expert of the present set
    longest = 0
    for s in range(len(step_offsets) - 1):
        longest = max(longest, step_offsets[s + 1] - step_offsets[s])
    row = np.empty(longest, np.int64)
    step_now = -1
    for m in range(len(set_step)):
        step = set_step[m]
        layer = set_layer[m]
        first = step_offsets[step]
        count = step_offsets[step + 1] - first
        if step != step_now:
            step_now = step
            for i in range(count):
                row[i] = row_start[step_token[first + i]]
        target = table[step_phase[step], set_class[m], layer]
        in_window = windows[window_of[step], layer]
        path = 0 if cached[m] else 1
        for i in range(set_offsets[m], set_offsets[m + 1]):
            level = levels[i]
            level_of[experts[i]] = level
            target[level, path] += 1
            in_window[level, path] += 1
        lookup = set_offsets[m]
        for i in range(count):
            token = step_token[first + i]
            r = row[i]
            while r < row_start[token + 1] and layer_index[r] < layer:
                r += 1
            row[i] = r
            if r == row_start[token + 1] or layer_index[r] != layer:
                continue
            of_request = by_request[request[token], pool_of_layer[layer]]
            for p in range(pick_offsets[r], pick_offsets[r + 1]):
                if every_pick:
                    level = levels[lookup]
                    lookup += 1
                else:
                    level = level_of[picks[p]]
                target[level, 2] += 1
                in_window[level, 2] += 1
                of_request[level] += 1
    return table, by_request, windows
