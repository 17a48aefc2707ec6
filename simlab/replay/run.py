"""Replay a trace: the wrapper that validates, lays out the pools, runs the kernel and adds up.

`Replayer` holds what all cells of a trace share (schedules, access sets); `replay_cell` is the
short form for one cell. Many cells: grid.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.errors import PolicyError, SimlabError, UsageError
from simlab.model.layout import ExpertLayout, layout_of
from simlab.policy.loader import Policy
from simlab.policy.protocol import Cache, Group, new_cache
from simlab.policy.registry import load_policy
from simlab.replay import kernel
from simlab.replay.access import (
    EVERY_PICK,
    FIRST_SEEN,
    LAST_PICKED,
    Access,
    build_access,
)
from simlab.replay.cell import Cell, Outcomes
from simlab.replay.compile import CompiledPolicy, compile_policy
from simlab.replay.needs import Needs
from simlab.replay.row import result_row
from simlab.replay.schedule import DEFAULT_UBATCH, build_schedule, tokens_of
from simlab.result.schema import Result
from simlab.trace.schema import Trace

#: Semantics -> (order of an access set, what a pool is, most tokens of a cached step: 0 = no gate).
SEMANTICS: dict[str, tuple[int, str, int]] = {
    "llama.cpp": (FIRST_SEEN, "group", 32),
    "per-pick": (EVERY_PICK, "group", 0),
    "bmoe": (LAST_PICKED, "all layers, bytes", 0),
}
ON_DECLINE = ("stream", "cpu")
#: Access sets per kernel call: often enough for a progress bar and Ctrl-C, rare enough to cost
#: nothing.
CHUNK = 500_000


class Replayer:
    """Replays cells of one trace under one set of engine options.

    Args:
        trace: the trace.
        layout: groups and bytes; default what the trace's metadata says.
        semantics: one of SEMANTICS. prefill: "engine" or "skip". schedule: "lanes" or "recorded".
        on_decline: "stream" or "cpu": who serves a declined miss, a property of the engine.
        seed: for policies that draw random numbers (each group starts from the same seed).
        ubatch: most tokens of a prefill step (``bmoe``: the whole prompt is one step).

    Raises:
        UsageError: an option is unknown.
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
        trace_name: str = "",
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
        self.trace = trace
        self.semantics = semantics
        self.order, self.pool, self.gate = SEMANTICS[semantics]
        self.layout = layout or layout_of(trace.meta)
        if semantics == "bmoe":
            if not all(group.tensor_bytes for group in self.layout.groups):
                raise UsageError(
                    "--semantics bmoe needs the expert bytes: import with --expert-bytes"
                )
            ubatch = max(ubatch, trace.n_rows)
        self.prefill, self.schedule, self.ubatch = prefill, schedule, ubatch
        self.on_decline, self.seed = on_decline, seed
        self.trace_name, self.command = trace_name, command
        self.tokens = tokens_of(trace)
        self._access: dict[tuple[int, int], Access] = {}
        self._needs = Needs(trace, self.gate)
        self._lock = threading.Lock()
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

    def _sets(self, concurrency: int, order: int) -> Access:
        if self.schedule == "recorded" and concurrency != 1:
            raise UsageError(
                "--schedule recorded replays the trace's steps: leave out --concurrency"
            )
        with self._lock:
            if (concurrency, order) not in self._access:
                schedule = build_schedule(
                    self.trace,
                    self.tokens,
                    concurrency=concurrency,
                    prefill=self.prefill,
                    ubatch=self.ubatch,
                    schedule=self.schedule,
                )
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
        access = self.access(cell.concurrency)
        found = Outcomes(
            access=access,
            outcome=np.zeros(len(access.experts), np.uint8),
            runs=np.zeros(len(access.set_step), np.int64),
            uncached=np.zeros(len(self.trace.meta.moe_layers), np.bool_),
            peak_bytes=None,
        )
        for number, members in enumerate(self.pools):
            slots = self.slots(cell, number)
            if slots == 0:
                found.uncached[members] = True
            peak = self._run_pool(compiled, cell, members, slots, found, progress)
            if self.semantics == "bmoe":
                found = replace(found, peak_bytes=peak)
        return found

    def slots(self, cell: Cell, number: int) -> int:
        """Slots of one pool (``bmoe``: the budget over the mean expert size)."""
        if self.semantics != "bmoe":
            return cell.slots[number]
        assert cell.budget_bytes is not None and self.layer_bytes is not None
        return max(1, int(cell.budget_bytes / np.mean(self.layer_bytes)))

    def _run_pool(
        self,
        compiled: CompiledPolicy,
        cell: Cell,
        members: Sequence[int],
        slots: int,
        found: Outcomes,
        progress: Callable[[int], None] | None,
    ) -> int:
        meta, access = self.trace.meta, found.access
        index_in_group = np.full(len(meta.moe_layers), -1, np.int32)
        index_in_group[members] = np.arange(len(members))
        keys = len(members) * meta.n_expert
        group = Group(
            layers=len(members),
            experts=meta.n_expert,
            keys=keys,
            slots=slots,
            k=meta.k,
            lookups=len(access.experts),
            seed=self.seed,
        )
        policy = cell.policy
        sizes = np.zeros(len(members), np.int64)
        if self.layer_bytes is not None:
            sizes[:] = np.asarray(self.layer_bytes)[members]
        capacity = keys if self.semantics == "bmoe" else slots
        cache = new_cache(
            group, capacity, next_use=policy.reads_future, weights=policy.reads_weights
        )
        needed = self._needs.of(policy, access, cell.concurrency, index_in_group, group)
        state = policy.new_state(
            group,
            cell.params,
            uses=needed.uses,
            layer_bytes=None if self.layer_bytes is None else sizes,
        )
        pool = np.array([cell.budget_bytes or 0, 0, 0], np.int64)
        fills = np.zeros((max(1, access.largest), 3), np.int32)
        sets = {
            "set_step": access.set_step,
            "set_layer": access.set_layer,
            "offsets": access.offsets,
            "experts": access.experts,
            "next_use": needed.next_use,
            "weights": needed.weights,
            "step_tokens": access.step_tokens,
        }
        results = {
            "protect": cell.policy.protects_present,
            "outcome": found.outcome,
            "runs": found.runs,
            "fills": fills,
        }
        n_sets = len(access.set_step)
        last = 0
        while last < n_sets:
            first, last = last, min(last + CHUNK, n_sets)
            # never in the middle of a step
            last = int(np.searchsorted(access.set_step, access.set_step[last - 1], side="right"))
            try:
                if self.semantics == "bmoe":
                    stopped = compiled.replay_batches(
                        state,
                        cache,
                        group,
                        first,
                        last,
                        **sets,
                        layer_bytes=sizes,
                        pool=pool,
                        **results,
                    )
                else:
                    stopped = compiled.replay(
                        state,
                        cache,
                        group,
                        first,
                        last,
                        **sets,
                        index_in_group=index_in_group,
                        unit=kernel.PER_PICK if self.order == EVERY_PICK else kernel.WHOLE_SET,
                        gate_tokens=self.gate,
                        **results,
                    )
            except (ArithmeticError, ValueError, LookupError, AssertionError) as exc:
                raise PolicyError(
                    f"policy {cell.policy.name} ({cell.policy.path}) failed:"
                    f" {type(exc).__name__}: {exc}"
                ) from None
            if stopped >= 0:
                raise PolicyError(self._broke(cell.policy, access, stopped, members, fills))
            if progress is not None:
                progress(last - first)
        _check_cache(cache, cell.policy)
        return int(pool[2])

    def _broke(
        self,
        policy: Policy,
        access: Access,
        stopped: int,
        members: Sequence[int],
        fills: npt.NDArray[np.int32],
    ) -> str:
        key, code = int(fills[0, 0]), int(fills[0, 1])
        layers, n_expert = self.trace.meta.moe_layers, self.trace.meta.n_expert
        if 0 <= key < len(members) * n_expert:
            named = f"layer {layers[members[key // n_expert]]}, expert {key % n_expert}"
        else:
            named = f"key {key}, which does not exist"
        why = "is not resident" if code == kernel.NOT_RESIDENT else "belongs to the present set"
        return (
            f"policy {policy.name} ({policy.path}) named a victim that {why} ({named}) at step"
            f" {int(access.set_step[stopped])}, layer {layers[access.set_layer[stopped]]}"
        )


def _check_cache(cache: Cache, policy: Policy) -> None:
    """Used slots and slot maps agree (conservation of residents)."""
    used = len(cache.key_of) - int(cache.n_free[0])
    if int((cache.slot_of >= 0).sum()) != used:
        raise SimlabError(
            f"internal error: slot map of {policy.name} does not match the used slots"
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
