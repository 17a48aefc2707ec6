"""Replay a trace: the wrapper that validates, lays out the pools, runs the kernel and adds up.

`Replayer` holds what all cells of a trace share (schedules, access sets); `replay_cell` is the
short form for one cell. Many cells: grid.py.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.errors import UsageError
from simlab.model.layout import ExpertLayout, fit_to_layout, layout_of, one_pool_a_layer
from simlab.policy.registry import load_policy
from simlab.replay import kernel
from simlab.replay.access import (
    EVERY_PICK,
    FIRST_SEEN,
    LAST_PICKED,
    Access,
    build_access,
    cycle,
)
from simlab.replay.capacity import Capacity
from simlab.replay.cell import Cell, Outcomes
from simlab.replay.compile import compile_policy
from simlab.replay.needs import Needs
from simlab.replay.pins import lookups_of, most_picked, without
from simlab.replay.pool import run_pool
from simlab.replay.row import result_row
from simlab.replay.schedule import DEFAULT_UBATCH, build_schedule, tokens_of
from simlab.result.schema import Result
from simlab.trace.schema import Trace

#: Semantics -> (order of an access set, what a pool is, most tokens of a cached step: 0 = no gate).
SEMANTICS: dict[str, tuple[int, str, int]] = {
    "llama.cpp": (FIRST_SEEN, "group", 32),
    "per-pick": (EVERY_PICK, "group", 0),
    "bmoe": (LAST_PICKED, "all layers, bytes", 0),
    "sglang": (FIRST_SEEN, "layer", 0),
}
ON_DECLINE = ("stream", "cpu")


class Replayer:
    """Replays cells of one trace under one set of engine options.

    Args:
        trace: the trace.
        layout: groups and bytes, whatever those of the trace were; default what its metadata says.
            Rows of layers that the layout keeps on the device are left out.
        semantics: one of SEMANTICS. prefill: "engine" or "skip". schedule: "lanes" or "recorded".
        on_decline: "stream" or "cpu": who serves a declined miss, a property of the engine.
        seed: for policies that draw random numbers (each group starts from the same seed).
        ubatch: most tokens of a prefill step (``bmoe``: the whole prompt is one step).
        steps: only so many first steps of the schedule; told in the results' schedule.
        pin: experts of each layer that are resident beside the pools, in room taken from them; the
            most picked ones of ``pin_from`` (default: of the trace itself, which is hindsight).
        capacity: shares of the pools' slots over time; None: all of them, always.
        draft, acceptance: see build_schedule; results are marked approximate.
        trace_name, layout_name: printed with the results.

    Raises:
        UsageError: an option is unknown, or the trace does not fit the layout.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        layout: ExpertLayout | None = None,
        semantics: str = "llama.cpp",
        prefill: str = "engine",
        schedule: str = "lanes",
        on_decline: str = "stream",
        seed: int = 0,
        ubatch: int = DEFAULT_UBATCH,
        steps: int | None = None,
        pin: int = 0,
        pin_from: Trace | None = None,
        capacity: Capacity | None = None,
        draft: int = 0,
        acceptance: float = 1.0,
        trace_name: str = "",
        layout_name: str = "",
        command: str = "",
    ) -> None:
        if semantics not in SEMANTICS:
            raise UsageError(
                f"--semantics must be one of {', '.join(SEMANTICS)}, not {semantics!r}"
            )
        if not -(2**63) <= seed < 2**63:
            raise UsageError(f"--seed must fit 64 bits, not {seed}")
        if on_decline not in ON_DECLINE:
            raise UsageError(f"--on-decline must be one of {', '.join(ON_DECLINE)}")
        self.layout = layout or layout_of(trace.meta)
        self.trace = trace = trace if layout is None else _refitted(trace, layout)
        if semantics == "sglang":
            self.layout = one_pool_a_layer(self.layout)
        self.semantics = semantics
        self.order, self.pool, self.gate = SEMANTICS[semantics]
        if semantics == "bmoe":
            if not all(group.tensor_bytes for group in self.layout.groups):
                raise UsageError(
                    "--semantics bmoe needs the expert bytes: import with --expert-bytes"
                )
            ubatch = max(ubatch, trace.n_rows)
        if steps is not None and steps < 1:
            raise UsageError(f"--steps must be 1 or more, not {steps}")
        self.prefill, self.schedule, self.ubatch, self.steps = prefill, schedule, ubatch, steps
        self.skipped = 0  # steps before the first that is run
        self.on_decline, self.seed = on_decline, seed
        self.trace_name, self.layout_name, self.command = trace_name, layout_name, command
        self.tokens = tokens_of(trace)
        self._access: dict[tuple[int, int], Access] = {}
        self._cycles: dict[int, tuple[int, int, int]] = {}
        self.needs = Needs(trace)
        self.lock = threading.Lock()
        position = {layer: i for i, layer in enumerate(trace.meta.moe_layers)}
        self.layer_bytes: list[int] | None = None
        if all(group.tensor_bytes for group in self.layout.groups):
            self.layer_bytes = [0] * len(position)
            for group in self.layout.groups:
                for layer in group.layers:
                    self.layer_bytes[position[layer]] = sum(group.tensor_bytes)
        # the pools: which layers (as positions) share one
        self.pools: list[list[int]]
        if semantics == "bmoe":
            self.pools = [list(range(len(position)))]
        else:
            self.pools = [[position[layer] for layer in g.layers] for g in self.layout.groups]
        self.draft, self.acceptance = draft, acceptance
        self.capacity = capacity
        if capacity is not None and semantics == "bmoe":
            raise UsageError("--capacity is not for bmoe: its pool is counted in bytes")
        self.pin, self.hindsight = pin, pin_from is None
        self.pinned: npt.NDArray[np.bool_] | None = None
        if pin:
            if semantics == "bmoe":
                raise UsageError("--pin is not for bmoe: its pool is counted in bytes")
            told = trace if pin_from is None else pin_from
            if told.meta.n_expert != trace.meta.n_expert:
                raise UsageError("--pin-from names a trace of another number of experts")
            self.pinned = most_picked(told, trace.meta.moe_layers, pin)

    def first_steps(self, n: int) -> Replayer:
        """The same over the first ``n`` steps only."""
        return self.window(0, n)

    def window(self, first: int, n: int) -> Replayer:
        """The same over ``n`` steps from step ``first`` on, with pools that start empty there."""
        other = copy.copy(self)
        other.skipped = self.skipped + first
        other.steps = n if self.steps is None else min(n, self.steps - first)
        other._access, other.needs = {}, Needs(self.trace)
        other._cycles = {}
        other.lock = threading.Lock()
        return other

    def access(self, concurrency: int) -> Access:
        """The access sets at a concurrency; made once.

        Raises:
            UsageError: recorded steps know no other concurrency than their own.
        """
        return self._sets(concurrency, self.order)

    def distinct(self, concurrency: int) -> Access:
        """The distinct experts of each step and layer: what the cycle T counts."""
        order = FIRST_SEEN if self.order == EVERY_PICK else self.order
        return self._sets(concurrency, order)

    def cycle(self, concurrency: int) -> tuple[int, int, int]:
        """Min, median and max of the cycle T in the largest pool; counted once."""
        if concurrency not in self._cycles:
            members = np.zeros(len(self.trace.meta.moe_layers), np.bool_)
            members[max(self.pools, key=len)] = True
            self._cycles[concurrency] = cycle(self.distinct(concurrency), members)
        return self._cycles[concurrency]

    def _sets(self, concurrency: int, order: int) -> Access:
        if self.schedule == "recorded" and concurrency != 1:
            raise UsageError(
                "--schedule recorded replays the trace's steps: leave out --concurrency"
            )
        with self.lock:
            if (concurrency, order) not in self._access:
                schedule = build_schedule(
                    self.trace,
                    self.tokens,
                    concurrency=concurrency,
                    prefill=self.prefill,
                    ubatch=self.ubatch,
                    schedule=self.schedule,
                    draft=self.draft,
                    acceptance=self.acceptance,
                    seed=self.seed,
                )
                if self.steps is not None:
                    schedule = schedule.part(self.skipped, self.steps)
                self._access[concurrency, order] = build_access(
                    self.trace, self.tokens, schedule, order
                )
            return self._access[concurrency, order]

    def run(self, cell: Cell, progress: Callable[[int], None] | None = None) -> Result:
        """Replay one cell and add it up.

        Args:
            progress: called with the number of access sets done since the last call.

        Raises:
            PolicyError: the policy broke the protocol; names policy, key and event.
        """
        started = time.time()
        return result_row(self, cell, self.outcomes(cell, progress), started)

    def outcomes(self, cell: Cell, progress: Callable[[int], None] | None = None) -> Outcomes:
        """Replay one cell and tell what became of each lookup; arguments and errors as in run."""
        compiled = compile_policy(cell.policy, batches=self.semantics == "bmoe")
        whole = access = self.access(cell.concurrency)
        if self.pinned is not None:
            access = without(whole, lookups_of(whole, self.pinned))
        found = Outcomes(
            access=access,
            outcome=np.zeros(len(access.experts), np.uint8),
            runs=np.zeros(len(access.set_step), np.int64),
            uncached=np.zeros(len(self.trace.meta.moe_layers), np.bool_),
            peak_bytes=None,
        )
        for number, members in enumerate(self.pools):
            by_step = self.slots_by_step(cell, number)
            if not by_step.any():
                found.uncached[members] = True
            peak = run_pool(self, compiled, cell, members, by_step, found, progress)
            if self.semantics == "bmoe":
                found = replace(found, peak_bytes=peak)
        if self.pinned is not None:
            large = np.zeros(len(whole.set_step), np.bool_)
            for number, members in enumerate(self.pools):
                of_pool = np.isin(whole.set_layer, members)
                large |= of_pool & ~self.on_cached_path(whole, self.slots_by_step(cell, number))
            of_lookup = np.repeat(large, np.diff(whole.offsets))
            outcome = np.where(of_lookup, kernel.LARGE_HIT, kernel.HIT).astype(np.uint8)
            outcome[~lookups_of(whole, self.pinned)] = found.outcome
            found = replace(found, access=whole, outcome=outcome)
        return found

    def on_cached_path(self, access: Access, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether a pool serves each access set: bool [sets].

        Args:
            slots: int64 [steps], slots of the pool in each step.
        """
        served: npt.NDArray[np.bool_] = slots > 0
        if self.gate:
            tokens = access.step_tokens.astype(np.int64)
            needed = np.minimum(tokens * self.trace.meta.k, self.trace.meta.n_expert)
            served &= (tokens <= self.gate) & (needed <= slots)
        if served.all():
            return np.ones(len(access.set_step), np.bool_)
        return served[access.set_step]

    def slots_by_step(self, cell: Cell, number: int) -> npt.NDArray[np.int64]:
        """Slots of one pool in each step: int64 [steps]; all the same without ``capacity``."""
        slots, n_steps = self.slots(cell, number), len(self.access(cell.concurrency).step_tokens)
        if self.capacity is None:
            return np.full(n_steps, slots, np.int64)
        return self.capacity.slots_at(slots, n_steps)

    def slots(self, cell: Cell, number: int) -> int:
        """Slots of one pool, less those of pinned experts (``bmoe``: budget over mean size).

        Raises:
            UsageError: nothing is left.
        """
        if self.semantics != "bmoe":
            left = cell.slots[number] - self.pin * len(self.pools[number])
            if left < 1 and self.pin:
                raise UsageError(
                    f"--pin {self.pin} takes all {cell.slots[number]} slots of a pool of"
                    f" {len(self.pools[number])} layers: pin fewer, or give more slots"
                )
            return left
        assert cell.budget_bytes is not None and self.layer_bytes is not None
        return max(1, int(cell.budget_bytes / np.mean(self.layer_bytes)))


def _refitted(trace: Trace, layout: ExpertLayout) -> Trace:
    """The trace as another layout sees it: its bytes, and only the layers that have a pool."""
    meta = fit_to_layout(trace.meta, layout)
    if not layout.resident:
        return replace(trace, meta=meta)
    kept = np.isin(trace.layer, layout.layers)
    if not kept.any():
        raise UsageError("the trace has no row of the layers that are in host memory")
    sizes = np.diff(trace.offsets)
    picks = np.repeat(kept, sizes)
    return replace(
        trace,
        meta=meta,
        request=trace.request[kept],
        token=trace.token[kept],
        phase=trace.phase[kept],
        layer=trace.layer[kept],
        offsets=np.concatenate(([0], np.cumsum(sizes[kept]))).astype(np.int64),
        experts=trace.experts[picks],
        weights=None if trace.weights is None else trace.weights[picks],
        step=None if trace.step is None else trace.step[kept],
    )


def replay_cell(
    trace: Trace,
    *,
    policy: str = "lru",
    slots: int | Sequence[int] | None = None,
    budget_bytes: int | None = None,
    concurrency: int = 1,
    params: Mapping[str, float] | None = None,
    **options: Any,
) -> Result:
    """Replay one policy at one size.

    Args:
        trace: from simlab.trace.read.read_trace.
        policy: name or file of a policy.
        slots: slots per group, one number for all groups or one each; clipped to a group's keys.
        budget_bytes: the pool of ``semantics="bmoe"``, in bytes.
        concurrency: number of streams decoded together.
        params: parameter values of the policy.
        options: see Replayer (semantics, prefill, schedule, on_decline, seed, ubatch, layout).

    Returns:
        The result row; ``.to_dict()`` for JSON.

    Raises:
        UsageError: an argument is not allowed. PolicyError: the policy failed.
    """
    replayer = Replayer(trace, **options)
    groups = len(replayer.layout.groups)
    if replayer.semantics == "bmoe":
        if budget_bytes is None or budget_bytes < 1:
            raise UsageError("semantics bmoe needs budget_bytes, at least 1")
        sizes: tuple[int, ...] = ()
    else:
        if slots is None:
            raise UsageError("slots is required")
        each = [slots] * groups if isinstance(slots, int) else list(slots)
        if len(each) != groups or min(each) < 0:
            raise UsageError(f"slots must be 0 or more, one number or one per group ({groups})")
        sizes = tuple(min(n, replayer.layout.keys_of(i)) for i, n in enumerate(each))
    cell = Cell(load_policy(policy), sizes, budget_bytes, concurrency, params or {})
    return replayer.run(cell)
