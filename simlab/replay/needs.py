"""What a policy may ask for beside the picks: next uses, uses of the whole run, router weights."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.errors import UsageError
from simlab.policy.jit import cached_jit
from simlab.policy.loader import Policy
from simlab.policy.protocol import Group
from simlab.replay.access import EVERY_PICK, Access, frozen, next_uses
from simlab.trace.schema import Trace


class Needed(NamedTuple):
    """What one pool of a run needs.

    ``next_use``: int32 [lookups], ``weights``: float32 [lookups]; length 0 when not needed.
    ``uses``: int64 [keys] or None.
    """

    next_use: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    uses: npt.NDArray[np.int64] | None


class Needs:
    """Finds what policies need and keeps what cells can share. Threads may share it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._next_use: dict[tuple[Any, ...], npt.NDArray[np.int32]] = {}
        self._weights: dict[int, npt.NDArray[np.float32]] = {}
        self._lock = threading.Lock()

    def of(
        self,
        policy: Policy,
        access: Access,
        concurrency: int,
        index_in_group: npt.NDArray[np.int32],
        group: Group,
        served: npt.NDArray[np.bool_],
    ) -> Needed:
        """What ``policy`` needs in one pool.

        Args:
            served: bool [sets], which access sets take the cached path.

        Raises:
            UsageError: the trace is too long for bounds, or has no router weights.
        """
        next_use, weights, uses = np.zeros(0, np.int32), np.zeros(0, np.float32), None
        if policy.reads_future:
            next_use = self._next_uses(access, concurrency, index_in_group, group, served)
        if policy.reads_weights:
            weights = self._lookup_weights(policy, access, concurrency)
        if "uses" in policy.needs:
            where = (access.set_layer, access.offsets, access.experts, served, index_in_group)
            uses = count_uses(*where, group.experts)
        return Needed(next_use, weights, uses)

    def _next_uses(
        self,
        access: Access,
        concurrency: int,
        index_in_group: npt.NDArray[np.int32],
        group: Group,
        served: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int32]:
        if len(access.experts) + group.keys >= 2**31:
            raise UsageError("bounds need fewer than 2^31 lookups: slice the trace")
        key = (concurrency, index_in_group.tobytes(), np.packbits(served).tobytes())
        with self._lock:
            if key not in self._next_use:
                self._next_use.clear()  # sizes share one; keep only the latest
                self._next_use[key] = next_uses(
                    access.set_layer,
                    access.offsets,
                    access.experts,
                    served,
                    index_in_group,
                    group.experts,
                )
            return self._next_use[key]

    def _lookup_weights(
        self, policy: Policy, access: Access, concurrency: int
    ) -> npt.NDArray[np.float32]:
        if self.trace.weights is None:
            raise UsageError(
                f"policy {policy.name} needs router weights, and the trace has none: capture with"
                " --weights, import a file with a column `weights`, or leave the policy out"
            )
        with self._lock:
            if concurrency not in self._weights:
                self._weights[concurrency] = lookup_weights(self.trace, access)
            return self._weights[concurrency]


def lookup_weights(trace: Trace, access: Access) -> npt.NDArray[np.float32]:
    """Router weights of each lookup: float32 [lookups], summed over the picks that it stands for.

    The trace must have weights.
    """
    assert trace.weights is not None
    weights: npt.NDArray[np.float32] = _weigh(
        access.set_step,
        access.set_layer,
        access.offsets,
        access.experts,
        frozen(access.schedule.offsets),
        frozen(access.schedule.token),
        frozen(access.tokens.row_start),
        frozen(access.layer_index),
        frozen(trace.offsets),
        frozen(trace.experts),
        trace.weights.astype(np.float32),
        trace.meta.n_expert,
        access.order == EVERY_PICK,
    )
    return weights


@cached_jit()
def _weigh(
    set_step: Any,
    set_layer: Any,
    offsets: Any,
    experts: Any,
    step_offsets: Any,
    step_token: Any,
    row_start: Any,
    layer_index: Any,
    pick_offsets: Any,
    picks: Any,
    weights: Any,
    n_expert: int,
    every_pick: bool,
) -> Any:
    result = np.zeros(len(experts), np.float32)
    place = np.zeros(n_expert, np.int64)  # of an expert among the lookups of the set
    for s in range(len(set_step)):
        row_begin = offsets[s]
        for i in range(offsets[s], offsets[s + 1]):
            place[experts[i]] = i
        for t in step_token[step_offsets[set_step[s]] : step_offsets[set_step[s] + 1]]:
            for r in range(row_start[t], row_start[t + 1]):
                if layer_index[r] != set_layer[s]:
                    continue
                row_end = row_begin + pick_offsets[r + 1] - pick_offsets[r]
                if every_pick:  # the lookups of a row lie side by side
                    for i in range(row_begin, row_end):
                        place[experts[i]] = i
                    row_begin = row_end
                for p in range(pick_offsets[r], pick_offsets[r + 1]):
                    result[place[picks[p]]] += weights[p]
    return result


@cached_jit()
def count_uses(
    set_layer: Any, offsets: Any, experts: Any, served: Any, index_in_group: Any, n_expert: int
) -> Any:
    """Lookups of each key of a group: int64 [keys]. Arguments as next_uses."""
    n_layers = 0
    for i in index_in_group:
        n_layers = max(n_layers, i + 1)
    uses = np.zeros(n_layers * n_expert, np.int64)
    for s in range(len(set_layer)):
        layer = index_in_group[set_layer[s]]
        if layer >= 0 and served[s]:
            for i in range(offsets[s], offsets[s + 1]):
                uses[layer * n_expert + experts[i]] += 1
    return uses
