"""From what became of each lookup to counters: by class, phase, layer, request and window.

The kernel writes one byte a lookup; this walk over the schedule adds them up, once, outside the hot
loop. It also attributes picks: a pick is a hit when its key was resident as the access set began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import cached_jit
from simlab.replay.access import EVERY_PICK, Access, frozen
from simlab.replay.kernel import DECLINED, HIT, LARGE_HIT, LARGE_STREAMED, UPLOADED
from simlab.result.schema import CLASSES, Counters
from simlab.trace.schema import Trace

#: Columns of the tables below.
PICKS, PICK_HITS, RUNS, OUTCOME = 0, 1, 2, 3
COLUMNS = 8
N_WINDOWS = 50


class Tables(NamedTuple):
    """What is counted of a cell before it is summed.

    ``table``: int64 [phase, class, layer, column]; ``by_request``: int64 [requests, 2], picks and
    pick hits; ``windows``: int64 [windows, layer, column]. Columns: PICKS, PICK_HITS, RUNS, then
    OUTCOME + the kernel's codes.
    """

    table: npt.NDArray[np.int64]
    by_request: npt.NDArray[np.int64]
    windows: npt.NDArray[np.int64]


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
    window_of = windows_of_steps(access)
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
        len(trace.meta.moe_layers),
        len(access.tokens.request_ids),
        access.order == EVERY_PICK,
        min(N_WINDOWS, len(window_of)),
    )
    return summed(
        trace,
        access,
        Tables(table, by_request, windows),
        _classes_of_steps(access, outcome),
        layer_bytes,
        on_decline=on_decline,
        uncached_layers=uncached_layers,
    )


def windows_of_steps(access: Access) -> npt.NDArray[np.int64]:
    """The window of each step: int64 [steps]."""
    n_steps = len(access.step_tokens)
    return np.arange(n_steps) * min(N_WINDOWS, n_steps) // n_steps


def summed(
    trace: Trace,
    access: Access,
    tables: Tables,
    step_class: npt.NDArray[np.bool_],
    layer_bytes: Sequence[int] | None,
    *,
    on_decline: str,
    uncached_layers: npt.NDArray[np.bool_],
    runs_known: bool = True,
    parts: bool = True,
) -> Account:
    """An account from the tables of a cell.

    Args:
        step_class: bool [steps, classes]. The others as in account.
        runs_known: whether the tables count merged runs. parts: whether by_layer, by_request and
            windows are wanted; else they are empty.
    """
    table, by_request, windows = tables
    n_steps = len(access.step_tokens)
    window_of = windows_of_steps(access)
    sizes: npt.NDArray[Any] | None = None
    if layer_bytes is not None:
        # whole numbers without a bound where 64 bits might not do
        small = max(layer_bytes) * len(access.experts) < 2**63
        sizes = np.asarray(layer_bytes, np.int64 if small else object)

    def counters(
        part: npt.NDArray[np.int64],
        steps: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        layers: slice | npt.NDArray[np.int64] = slice(None),
    ) -> list[Counters]:
        """Counters of each part: [parts, layers, columns], with the steps and tokens of each.

        ``layers``: index of the MoE layers that the part's layers are.
        """
        outcome = part[..., OUTCOME:]
        uncached = uncached_layers[layers]
        streamed = outcome[..., LARGE_STREAMED] * ~uncached
        declined = outcome[..., DECLINED] + outcome[..., LARGE_STREAMED] * uncached
        if on_decline == "stream":
            streamed, declined = streamed + declined, declined * 0
        uploaded = outcome[..., UPLOADED]
        hits = outcome[..., HIT] + outcome[..., LARGE_HIT]
        lookups = outcome.sum(axis=-1)
        counted = {
            "lookups": lookups,
            "hits": hits,
            "misses": lookups - hits,
            "demand_uploads": uploaded,
            "streamed": streamed,
            "cpu_served": declined,
            "merged_runs": part[..., RUNS],
            "picks": part[..., PICKS],
            "pick_hits": part[..., PICK_HITS],
        }
        if sizes is not None:
            counted["bytes_moved"] = (uploaded + streamed) * sizes[layers]
        columns = {name: values.sum(axis=-1).tolist() for name, values in counted.items()}
        if not runs_known:
            columns["merged_runs"] = [None] * len(part)
        if sizes is None:
            columns["bytes_moved"] = [None] * len(part)
        columns |= {"steps": steps.tolist(), "tokens": tokens.tolist()}
        found = [
            Counters(**dict(zip(columns, values, strict=True)))
            for values in zip(*columns.values(), strict=True)
        ]
        for one in found:
            one.check("a part of a cell")
        return found

    tokens = access.step_tokens.astype(np.int64)
    prefill = access.step_phase == 0
    first_step = np.searchsorted(window_of, np.arange(len(windows) + 1))
    by_layer: list[Counters] = []
    by_window: list[Counters] = []
    if parts:
        each = np.arange(len(trace.meta.moe_layers))[:, None]
        none = np.zeros(len(each), np.int64)
        by_layer = counters(table.sum(axis=(0, 1))[:, None], none, none, each)
        tokens_before = np.concatenate(([0], np.cumsum(tokens)))[first_step]
        by_window = counters(windows, np.diff(first_step), np.diff(tokens_before))
    phases = np.stack((prefill, ~prefill))
    return Account(
        total=counters(
            table.sum(axis=(0, 1))[None], np.array([n_steps]), tokens.sum(keepdims=True)
        )[0],
        cached_lookups=int(table[..., OUTCOME : OUTCOME + 3].sum()),
        cached_hits=int(table[..., OUTCOME + HIT].sum()),
        by_class=dict(
            zip(
                CLASSES,
                counters(table.sum(axis=0), step_class.sum(axis=0), tokens @ step_class),
                strict=True,
            )
        ),
        by_phase=dict(
            zip(
                ("prefill", "decode"),
                counters(table.sum(axis=1), phases.sum(axis=1), phases @ tokens),
                strict=True,
            )
        ),
        by_layer=[
            {"layer": layer, **vars(part)}
            for layer, part in zip(trace.meta.moe_layers, by_layer, strict=False)
        ],
        by_request=[
            {"request": request, "picks": picks, "pick_hits": hits}
            for request, (picks, hits) in zip(
                access.tokens.request_ids.tolist(), by_request.tolist(), strict=True
            )
        ]
        if parts
        else [],
        windows=[
            {"first_step": first, "last_step": last - 1, **vars(part)}
            for first, last, part in zip(
                first_step.tolist(), first_step[1:].tolist(), by_window, strict=False
            )
        ],
    )


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
    table = np.zeros((2, 3, n_layers, COLUMNS), np.int64)
    windows = np.zeros((n_windows, n_layers, COLUMNS), np.int64)
    by_request = np.zeros((n_requests, 2), np.int64)
    resident = np.zeros(n_expert, np.bool_)
    one = np.zeros(COLUMNS, np.int64)
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
            one[OUTCOME + outcome[i]] += 1
            resident[experts[i]] = outcome[i] == HIT or outcome[i] == LARGE_HIT
        one[RUNS] = runs[m]
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
            one[PICKS] += n
            one[PICK_HITS] += hits
            by_request[request[token], 0] += n
            by_request[request[token], 1] += hits
        group = 0
        if outcome[set_offsets[m]] >= LARGE_HIT or count > 32:
            group = 2
        elif count > 8:
            group = 1
        target = table[step_phase[step], group, layer]
        in_window = windows[window_of[step], layer]
        for c in range(COLUMNS):
            target[c] += one[c]
            in_window[c] += one[c]
    return table, by_request, windows
