"""A cell's counters by request, for intervals: what would another sample of requests have given?

A lookup that several tokens of a step share counts for each of their requests in equal parts (two
of three tokens: two thirds), so the requests' counters add up to the cell's, at every concurrency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import cached_jit
from simlab.replay.access import EVERY_PICK, Access, frozen
from simlab.replay.cell import Outcomes
from simlab.replay.kernel import DECLINED, HIT, LARGE_STREAMED, UPLOADED
from simlab.replay.run import Replayer
from simlab.trace.schema import DECODE, Trace

_RUNS = 5  # the column behind the outcomes
_COLUMNS = 6


@dataclass(frozen=True, eq=False)
class RequestTable:
    """Counters of each request of a cell, n of them, float64 because lookups are shared.

    Attributes:
        ids: int32 [n], the trace's request numbers.
        lookups, hits: [n], over the cached path: hits / lookups is the cell's ``hit_rate``.
        tokens, steps: [n], decode tokens and parts of decode steps (all, without decode tokens);
            so are the next four:
        served: [n], lookups. moved: [n], bytes over the link (all 0 when bytes are unknown).
        copies: [n], merged runs and streamed experts, times the tensors of an expert.
        cpu_bytes: [n], bytes of experts that the CPU computes.
    """

    ids: npt.NDArray[np.int32]
    lookups: npt.NDArray[np.float64]
    hits: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    steps: npt.NDArray[np.float64]
    served: npt.NDArray[np.float64]
    moved: npt.NDArray[np.float64]
    copies: npt.NDArray[np.float64]
    cpu_bytes: npt.NDArray[np.float64]

    @property
    def misses(self) -> npt.NDArray[np.float64]:
        """Misses on the cached path: [n]."""
        return self.lookups - self.hits


def by_request(replayer: Replayer, outcomes: Outcomes) -> RequestTable:
    """Add up a cell's outcomes by request; requests without a token in the run are left out."""
    trace, access = replayer.trace, outcomes.access
    n_layers = len(trace.meta.moe_layers)
    n_requests = len(access.tokens.request_ids)
    schedule = access.schedule
    shares = shared_out(trace, access, outcomes.outcome, outcomes.runs)
    request = access.tokens.request[schedule.token]
    size = np.diff(schedule.offsets)
    decodes = bool((access.step_phase == DECODE).any())
    counted = np.repeat(access.step_phase == DECODE, size) | (not decodes)
    tokens = np.bincount(request[counted], minlength=n_requests).astype(np.float64)
    part = np.repeat(1 / size, size)[counted]
    steps = np.bincount(request[counted], weights=part, minlength=n_requests).astype(np.float64)
    phase = shares[:, 1] if decodes else shares.sum(axis=1)  # [requests, layers, columns]
    declined, streamed = phase[..., DECLINED].copy(), phase[..., LARGE_STREAMED].copy()
    declined[:, outcomes.uncached] += streamed[:, outcomes.uncached]
    streamed[:, outcomes.uncached] = 0
    if replayer.on_decline == "stream":
        streamed += declined
        declined[:] = 0
    sizes = np.array(replayer.layer_bytes or [0] * n_layers, np.float64)
    tensors = np.array([_tensors(replayer)[layer] for layer in trace.meta.moe_layers], np.float64)
    present = np.bincount(request, minlength=n_requests) > 0
    cached = shares.sum(axis=(1, 2))
    return RequestTable(
        ids=access.tokens.request_ids[present],
        lookups=cached[present, : DECLINED + 1].sum(axis=1),
        hits=cached[present, HIT],
        tokens=tokens[present],
        steps=steps[present],
        served=phase[present, :, :_RUNS].sum(axis=(1, 2)),
        moved=((phase[..., UPLOADED] + streamed) @ sizes)[present],
        copies=((phase[..., _RUNS] + streamed) @ tensors)[present],
        cpu_bytes=(declined @ sizes)[present],
    )


def shared_out(
    trace: Trace, access: Access, codes: npt.NDArray[np.uint8], runs: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Lookups shared out to requests: float64 [requests, phase, layers, 6], by code 0..4.

    Args:
        codes: uint8 [lookups], what is counted. runs: int64 [sets], shared as code 0 of the set is
            (uploads, of outcomes); in the last column.
    """
    schedule = access.schedule
    shares: npt.NDArray[np.float64] = _shares(
        frozen(schedule.offsets),
        frozen(schedule.token),
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
        codes,
        runs,
        trace.meta.n_expert,
        len(trace.meta.moe_layers),
        len(access.tokens.request_ids),
        access.order == EVERY_PICK,
    )
    return shares


def _tensors(replayer: Replayer) -> dict[int, int]:
    """Tensors of an expert by layer; 1 where the layout does not tell."""
    groups = replayer.layout.groups
    return {layer: max(1, len(g.tensor_bytes)) for g in groups for layer in g.layers}


@cached_jit(nogil=True)
def _shares(
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
    outcome: Any,
    runs: Any,
    n_expert: int,
    n_layers: int,
    n_requests: int,
    every_pick: bool,
) -> Any:
    """Returns float64 [requests, phase, layers, columns]: lookups by outcome, then merged runs.

    A set's runs are shared as its uploads are.
    """
    table = np.zeros((n_requests, 2, n_layers, _COLUMNS), np.float64)
    place = np.zeros(n_expert, np.int64)  # of an expert among the lookups of the set
    pickers = np.zeros(n_expert, np.int64)
    for m in range(len(set_step)):
        step = set_step[m]
        layer = set_layer[m]
        phase = step_phase[step]
        uploads = 0
        for i in range(set_offsets[m], set_offsets[m + 1]):
            place[experts[i]] = i
            pickers[experts[i]] = 0
            uploads += outcome[i] == UPLOADED
        run = runs[m] / uploads if uploads else 0.0
        lookup = set_offsets[m]
        for count in range(2):  # first count who picked, then share
            if every_pick and count == 0:
                continue
            for t in step_token[step_offsets[step] : step_offsets[step + 1]]:
                r = row_start[t]
                while r < row_start[t + 1] and layer_index[r] < layer:
                    r += 1
                if r == row_start[t + 1] or layer_index[r] != layer:
                    continue
                target = table[request[t], phase, layer]
                for p in range(pick_offsets[r], pick_offsets[r + 1]):
                    if count == 0:
                        pickers[picks[p]] += 1
                        continue
                    if every_pick:
                        code = outcome[lookup]
                        lookup += 1
                        part = 1.0
                    else:
                        code = outcome[place[picks[p]]]
                        part = 1.0 / pickers[picks[p]]
                    target[code] += part
                    if code == UPLOADED:
                        target[_RUNS] += part * run
    return table
