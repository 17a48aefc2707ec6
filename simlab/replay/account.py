"""From what became of each lookup to counters: by class, phase, layer, request and window.

The kernel writes one byte a lookup; this walk over the schedule adds them up, once, outside the hot
loop. It also attributes picks: a pick is a hit when its key was resident as the access set began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import cached_jit
from simlab.replay.access import EVERY_PICK, Access, frozen
from simlab.replay.kernel import DECLINED, HIT, LARGE_HIT, LARGE_STREAMED, UPLOADED
from simlab.result.schema import CLASSES, Counters
from simlab.trace.schema import Trace

#: Columns of the tables below.
_STEPS, _TOKENS, _PICKS, _PICK_HITS, _RUNS, _OUTCOME = 0, 1, 2, 3, 4, 5
_COLUMNS = 10
N_WINDOWS = 50


@dataclass(frozen=True, eq=False)
class Account:
    """Counters of one cell and its parts (see result.schema.Result), plus the cached path's own."""

    total: Counters
    cached_lookups: int
    cached_hits: int
    by_class: dict[str, Counters]
    by_phase: dict[str, Counters]
    by_layer: list[dict[str, Any]]
    by_request: list[dict[str, int]]
    windows: list[dict[str, Any]]


def account(
    trace: Trace,
    access: Access,
    outcome: npt.NDArray[np.uint8],
    runs: npt.NDArray[np.int64],
    layer_bytes: Sequence[int] | None,
    *,
    on_decline: str,
    uncached_layers: npt.NDArray[np.bool_],
) -> Account:
    """Add up one cell.

    Args:
        outcome: uint8 [lookups], runs: int64 [sets], both from the kernel.
        layer_bytes: bytes of one expert per MoE layer; None when unknown.
        on_decline: "stream" or "cpu", who serves a declined miss.
        uncached_layers: bool [MoE layers], layers of groups without a single slot: their misses go
            the way of declined ones.
    """
    n_layers = len(trace.meta.moe_layers)
    n_steps = len(access.step_tokens)
    n_windows = min(N_WINDOWS, n_steps)
    window_of = np.arange(n_steps) * n_windows // n_steps
    table, by_request, windows = _walk(
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
        outcome,
        runs,
        trace.meta.n_expert,
        n_layers,
        len(access.tokens.request_ids),
        access.order == EVERY_PICK,
        n_windows,
    )

    def moved(experts: npt.NDArray[np.int64]) -> int:
        """Bytes of so many experts of each layer, in Python's unbounded integers."""
        return sum(n * size for n, size in zip(experts.tolist(), layer_bytes or (), strict=True))

    def counters(part: npt.NDArray[np.int64], steps: int, tokens: int) -> Counters:
        """Sum a part of the table, [..., layers, columns], to counters."""
        by_layer = part.reshape(-1, n_layers, _COLUMNS).sum(axis=0)
        columns = by_layer.sum(axis=0)
        by_outcome = columns[_OUTCOME:]
        declined = by_layer[:, _OUTCOME + DECLINED].copy()
        streamed = by_layer[:, _OUTCOME + LARGE_STREAMED].copy()
        declined[uncached_layers] += streamed[uncached_layers]
        streamed[uncached_layers] = 0
        if on_decline == "stream":
            streamed += declined
            declined[:] = 0
        uploaded = by_layer[:, _OUTCOME + UPLOADED]
        result = Counters(
            steps=steps,
            tokens=tokens,
            lookups=int(by_outcome.sum()),
            hits=int(by_outcome[HIT] + by_outcome[LARGE_HIT]),
            misses=int(by_outcome.sum() - by_outcome[HIT] - by_outcome[LARGE_HIT]),
            demand_uploads=int(uploaded.sum()),
            streamed=int(streamed.sum()),
            cpu_served=int(declined.sum()),
            merged_runs=int(columns[_RUNS]),
            bytes_moved=None if layer_bytes is None else moved(uploaded + streamed),
            picks=int(columns[_PICKS]),
            pick_hits=int(columns[_PICK_HITS]),
        )
        result.check("a part of a cell")
        return result

    tokens = access.step_tokens
    prefill = access.step_phase == 0
    step_class = _classes_of_steps(access, outcome)
    first_step = [int(np.searchsorted(window_of, w)) for w in range(n_windows)] + [n_steps]
    return Account(
        total=counters(table, n_steps, int(tokens.sum())),
        cached_lookups=int(table[..., _OUTCOME : _OUTCOME + 3].sum()),
        cached_hits=int(table[..., _OUTCOME + HIT].sum()),
        by_class={
            name: counters(
                table[:, c], int(step_class[:, c].sum()), int(tokens[step_class[:, c]].sum())
            )
            for c, name in enumerate(CLASSES)
        },
        by_phase={
            name: counters(table[p], int(where.sum()), int(tokens[where].sum()))
            for p, (name, where) in enumerate((("prefill", prefill), ("decode", ~prefill)))
        },
        by_layer=[
            {"layer": layer, **_plain(counters(_only(table, i), 0, 0))}
            for i, layer in enumerate(trace.meta.moe_layers)
        ],
        by_request=[
            {"request": int(r), "picks": int(p), "pick_hits": int(h)}
            for r, (p, h) in zip(access.tokens.request_ids, by_request, strict=True)
        ],
        windows=[
            {
                "first_step": first_step[w],
                "last_step": first_step[w + 1] - 1,
                **_plain(
                    counters(
                        windows[w],
                        first_step[w + 1] - first_step[w],
                        int(tokens[first_step[w] : first_step[w + 1]].sum()),
                    )
                ),
            }
            for w in range(n_windows)
        ],
    )


def _only(table: npt.NDArray[np.int64], layer: int) -> npt.NDArray[np.int64]:
    """The table with all layers but one set to zero."""
    part = np.zeros_like(table)
    part[..., layer, :] = table[..., layer, :]
    return part


def _plain(counters: Counters) -> dict[str, Any]:
    return dict(vars(counters))


def _classes_of_steps(access: Access, outcome: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """bool [steps, classes]: a step counts in every class that one of its sets fell into."""
    result = np.zeros((len(access.step_tokens), len(CLASSES)), np.bool_)
    if len(access.set_step):
        large = outcome[access.offsets[:-1]] >= LARGE_HIT
        tokens = access.step_tokens[access.set_step]
        set_class = np.where(large | (tokens > 32), 2, np.where(tokens > 8, 1, 0))
        result[access.set_step, set_class] = True
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
    outcome: Any,
    runs: Any,
    n_expert: int,
    n_layers: int,
    n_requests: int,
    every_pick: bool,
    n_windows: int,
) -> Any:
    """Returns table int64 [phase, class, layer, column], by_request int64 [requests, 2] and windows
    int64 [windows, layer, column].
    """
    table = np.zeros((2, 3, n_layers, _COLUMNS), np.int64)
    windows = np.zeros((n_windows, n_layers, _COLUMNS), np.int64)
    by_request = np.zeros((n_requests, 2), np.int64)
    resident = np.zeros(n_expert, np.bool_)
    one = np.zeros(_COLUMNS, np.int64)
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
        one[:] = 0
        for i in range(set_offsets[m], set_offsets[m + 1]):
            one[_OUTCOME + outcome[i]] += 1
            resident[experts[i]] = outcome[i] == HIT or outcome[i] == LARGE_HIT
        one[_RUNS] = runs[m]
        lookup = set_offsets[m]
        for i in range(count):
            token = step_token[first + i]
            r = row[i]
            while r < row_start[token + 1] and layer_index[r] < layer:
                r += 1
            row[i] = r
            if r == row_start[token + 1] or layer_index[r] != layer:
                continue
            n = pick_offsets[r + 1] - pick_offsets[r]
            hits = 0
            for p in range(pick_offsets[r], pick_offsets[r + 1]):
                if every_pick:
                    hits += outcome[lookup] == HIT
                    lookup += 1
                else:
                    hits += resident[picks[p]]
            one[_PICKS] += n
            one[_PICK_HITS] += hits
            by_request[request[token], 0] += n
            by_request[request[token], 1] += hits
        group = 0
        if outcome[set_offsets[m]] >= LARGE_HIT or count > 32:
            group = 2
        elif count > 8:
            group = 1
        target = table[step_phase[step], group, layer]
        in_window = windows[window_of[step], layer]
        for c in range(_COLUMNS):
            target[c] += one[c]
            in_window[c] += one[c]
    return table, by_request, windows
