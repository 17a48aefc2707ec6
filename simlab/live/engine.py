"""Trace in the loop: the steps of a schedule with real copies, layer by layer, as an engine does.

Per layer: the router's ids come down from the device (one copy, one wait), the planner decides, the
misses go up on the side stream, and the layer's compute waits for them on the device. The host
waits nowhere else but at the end of a step, where an engine waits for the sampled token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from simlab.errors import SimlabError
from simlab.live.bank import Bank, wrong_slots
from simlab.live.compute import StandIn
from simlab.live.device import Device
from simlab.live.planner import Planner
from simlab.live.pool import SlotPool, Source
from simlab.replay.access import Access


@dataclass(eq=False)
class Run:
    """What one pass over a schedule gave. S steps of which ``done`` ran, M sets, P lookups.

    Attributes:
        outcome: uint8 [P], runs: int64 [M], experts: uint16 [P]: as the replayer has them.
        ms: float64 [S], device time of a step; upload_ms: of its copies, from the first's start to
            the last's end in each layer, added up. ids_ms, plan_ms, issue_ms: host time for waiting
            for router ids, for planning, and for giving copies to the device.
        n_bytes, copies: int64 [S], what was really given to the link.
        interrupted: Ctrl-C ended it.
    """

    outcome: npt.NDArray[np.uint8]
    runs: npt.NDArray[np.int64]
    experts: npt.NDArray[np.uint16]
    ms: npt.NDArray[np.float64]
    upload_ms: npt.NDArray[np.float64]
    ids_ms: npt.NDArray[np.float64]
    plan_ms: npt.NDArray[np.float64]
    issue_ms: npt.NDArray[np.float64]
    n_bytes: npt.NDArray[np.int64]
    copies: npt.NDArray[np.int64]
    done: int = 0
    interrupted: bool = False

    @classmethod
    def of(cls, access: Access) -> Run:
        """Empty results of a schedule."""
        n = len(access.step_tokens)
        return cls(
            outcome=np.zeros(len(access.experts), np.uint8),
            runs=np.zeros(len(access.set_step), np.int64),
            experts=np.zeros(len(access.experts), np.uint16),
            ms=np.zeros(n),
            upload_ms=np.zeros(n),
            ids_ms=np.zeros(n),
            plan_ms=np.zeros(n),
            issue_ms=np.zeros(n),
            n_bytes=np.zeros(n, np.int64),
            copies=np.zeros(n, np.int64),
        )


class Server(Protocol):
    """Gets the experts of one access set to where the layer computes."""

    def __call__(self, number: int, layer: int, picks: npt.NDArray[np.int64], tokens: int) -> int:
        """Serve layer ``layer`` (index in the group) of access set ``number``.

        Returns:
            How many rows of the pool the layer computes with; they stand in the lane's ``rows``.
        """


class Lane:
    """One group on the device: its pool, its experts in host memory, its stand-in compute.

    Attributes:
        rows: int64 [n_expert], rows of the pool that the present layer computes with.
    """

    def __init__(
        self, device: Device, bank: Bank, number: int, *, slots: int, staging: int, compute: bool
    ) -> None:
        group = bank.layout.groups[number]
        sizes = group.tensor_bytes
        uint8 = device.torch.uint8
        self.pool = SlotPool(
            device, [(n,) for n in sizes], [uint8] * len(sizes), slots=slots, staging=staging
        )
        self.sources = [Source(bank.of(number, layer)) for layer in range(len(group.layers))]
        self.rows_host = device.pinned((bank.layout.n_expert,), device.torch.int64, "slot numbers")
        self.rows = self.rows_host.numpy()
        self.compute = StandIn(device, self.pool, sizes, staging) if compute else None


class Engine:
    """A device with a bank and the pools of one size.

    Args:
        access: the access sets. picks: their picks (see picks.py), with offsets.
        layers: per MoE layer of the trace (group, index in the group).
        slots: of each group. compute: run the stand-in for the experts' compute.

    Raises:
        SimlabError: device or pinned memory is short.
    """

    def __init__(
        self,
        device: Device,
        bank: Bank,
        access: Access,
        offsets: npt.NDArray[np.int64],
        picks: npt.NDArray[np.int64],
        layers: Sequence[tuple[int, int]],
        slots: Sequence[int],
        *,
        compute: bool = False,
    ) -> None:
        torch = device.torch
        self.device, self.bank, self.access = device, bank, access
        self.layers, self.slots = layers, slots
        n_expert = bank.layout.n_expert
        self.lanes = [
            Lane(device, bank, g, slots=n, staging=n_expert, compute=compute)
            for g, n in enumerate(slots)
        ]
        self._offsets = offsets.tolist()
        longest = int(np.diff(offsets).max(initial=1))
        # what a router leaves on the device, all at once
        self._ids = device.empty((max(1, len(picks)),), torch.int64, "the router ids")
        self._ids[: len(picks)].copy_(torch.from_numpy(picks))
        self._ids_host = device.pinned((longest,), torch.int64, "router ids")
        self._ids_here = self._ids_host.numpy()
        self._ids_ready = device.event()
        n_steps = len(access.step_tokens)
        self._first = np.searchsorted(access.set_step, np.arange(n_steps + 1)).tolist()
        deepest = int(np.diff(self._first).max(initial=1))
        self._step_marks = (device.event(timed=True), device.event(timed=True))
        self._copy_marks = [
            (device.event(timed=True), device.event(timed=True)) for _ in range(deepest)
        ]
        self._copied = 0  # of the marks, in this step

    def run(
        self,
        serve: Sequence[Server],
        run: Run,
        *,
        steps: Sequence[int] | None = None,
        begin_step: Callable[[int], None] = lambda tokens: None,
        after_step: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """Run steps; results go to ``run``, which Ctrl-C leaves with the steps done.

        Args:
            serve: one Server per group.
            steps: which, in order; all by default.
            begin_step: told the tokens of each step before it begins.
            after_step: told each step that is done; True ends the run.
        """
        tokens = self.access.step_tokens.tolist()
        try:
            for step in range(len(tokens)) if steps is None else steps:
                begin_step(tokens[step])
                self._step(step, tokens[step], serve, run)
                run.done += 1
                if after_step(step):
                    break
        except KeyboardInterrupt:
            run.interrupted = True
        self.device.synchronize()

    def _step(self, step: int, tokens: int, serve: Sequence[Server], run: Run) -> None:
        device, offsets = self.device, self._offsets
        clock = time.perf_counter
        ids_s = serve_s = 0.0
        begin, end = self._step_marks
        self._copied = 0
        self._plan_s = 0.0
        moved = [(lane.pool.n_bytes, lane.pool.copies) for lane in self.lanes]
        device.record(begin, device.main)
        for number in range(self._first[step], self._first[step + 1]):
            group, layer = self.layers[self.access.set_layer[number]]
            first, last = offsets[number], offsets[number + 1]
            started = clock()
            self._ids_host[: last - first].copy_(self._ids[first:last], non_blocking=True)
            device.record(self._ids_ready, device.main)
            device.finish(self._ids_ready)
            arrived = clock()
            used = serve[group](number, layer, self._ids_here[: last - first], tokens)
            serve_s += clock() - arrived
            ids_s += arrived - started
            compute = self.lanes[group].compute
            if compute is not None:
                compute(self.lanes[group].rows_host, used)
        device.record(end, device.main)
        device.finish(end)
        run.ms[step] = device.ms(begin, end)
        run.upload_ms[step] = sum(device.ms(*self._copy_marks[i]) for i in range(self._copied))
        run.ids_ms[step] = 1e3 * ids_s
        run.plan_ms[step] = 1e3 * self._plan_s
        run.issue_ms[step] = 1e3 * (serve_s - self._plan_s)
        for lane, (n_bytes, copies) in zip(self.lanes, moved, strict=True):
            run.n_bytes[step] += lane.pool.n_bytes - n_bytes
            run.copies[step] += lane.pool.copies - copies

    def planned(self, seconds: float) -> None:
        """A server tells how long it planned."""
        self._plan_s += seconds

    def uploads(self, pool: SlotPool) -> Uploads:
        """A context in which copies go to the side stream and are timed."""
        marks = self._copy_marks[self._copied]
        self._copied += 1
        return Uploads(self.device, pool, marks)

    def check_slots(self, planner: Planner) -> None:
        """Compare every byte of every used slot with what it must hold.

        Raises:
            SimlabError: a slot holds something else.
        """
        self.device.synchronize()
        for g, (lane, plan) in enumerate(zip(self.lanes, planner.groups, strict=True)):
            wrong = wrong_slots(self.device, self.bank, g, lane.pool.tensors, plan.resident)
            if wrong:
                raise SimlabError(
                    f"{len(wrong)} slots of group {g + 1} do not hold the bytes of their experts"
                    f" (the first: slot {wrong[0]}); this run is invalid"
                )


class Uploads:
    """``with`` it, copies are given to the side stream, ordered between readers and compute."""

    __slots__ = ("_context", "_device", "_marks", "_pool")

    def __init__(self, device: Device, pool: SlotPool, marks: tuple[Any, Any]) -> None:
        self._device, self._pool, self._marks = device, pool, marks

    def __enter__(self) -> SlotPool:
        device = self._device
        self._pool.begin()
        self._context = device.on(device.side)
        self._context.__enter__()
        device.record(self._marks[0], device.side)
        return self._pool

    def __exit__(self, *exc: object) -> None:
        device = self._device
        device.record(self._marks[1], device.side)
        self._context.__exit__(None, None, None)
        self._pool.end()
