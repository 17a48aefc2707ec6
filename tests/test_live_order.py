"""The order of copies and compute on a device that is late: readers, then copies, then compute.

No GPU is at hand, so a device that queues its work stands for one. It runs the queues in random
order within what streams, events and waits demand; each layer's compute looks at the bytes that it
would compute with, and at the slot numbers in host memory, when its turn comes.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="live mode needs torch: pip install 'simlab[capture]'")

from lazy_device import LazyDevice
from live_cases import assert_as_replayed, loaded
from strategies import small_trace

from simlab.live.bank import Bank, content
from simlab.live.engine import Engine, Lane, Run
from simlab.live.picks import picks_of
from simlab.live.planner import Planner
from simlab.live.pool import SlotPool, Source
from simlab.live.serve import CachedPath
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer


class Reader:
    """In place of the stand-in compute: compares, on ``main``, what the layer would read."""

    def __init__(self, device: LazyDevice, bank: Bank, group: int, lane: Lane) -> None:
        self.device, self.bank, self.group, self.lane = device, bank, group, lane
        self.layer, self.experts = 0, [0]
        self.wrong = self.reads = 0

    def __call__(self, rows: Any, n: int) -> None:
        told, layer, experts = rows[:n].tolist(), self.layer, list(self.experts)
        assert n == len(experts)

        def read() -> None:
            now = rows[:n].tolist()  # what a copy of the slot numbers would find in host memory
            owner = self.bank.owner(self.group, layer)
            sizes = self.bank.layout.groups[self.group].tensor_bytes
            for row, expert in zip(now, experts, strict=True):
                self.reads += 1
                self.wrong += any(
                    not self.device.torch.equal(
                        self.lane.pool.tensors[t][row],
                        content(self.device, size, owner, expert, t),
                    )
                    for t, size in enumerate(sizes)
                )
            self.wrong += now != told

        self.device.give(self.device.main, read)


class Told(CachedPath):
    """The cached path, which also tells the reader whose experts the rows are."""

    reader: Reader

    def __call__(self, number: int, layer: int, picks: Any, tokens: int) -> int:
        used = super().__call__(number, layer, picks, tokens)
        count = int(self._plan.counts[0])
        self.reader.layer, self.reader.experts = layer, self._plan.experts[:count].tolist()
        return used


def run_late(number: int, seed: int, prefer: str | None, policy: str) -> tuple[int, int]:
    """A cell on the late device. Returns (experts read, of them wrong)."""
    case, rnd = small_trace(Random(number)), Random(seed)
    replayer = Replayer(case.trace, seed=seed)
    layout = replayer.layout
    slots = tuple(
        rnd.choice([0, case.shape.k, layout.keys_of(g) // 3, layout.keys_of(g) // 2])
        for g in range(len(layout.groups))
    )
    cell = Cell(loaded(policy), slots, None, rnd.choice([1, 2, 3]))
    access = replayer.access(cell.concurrency)
    at = {n: (g, i) for g, group in enumerate(layout.groups) for i, n in enumerate(group.layers)}
    layers = [at[n] for n in case.trace.meta.moe_layers]
    device = LazyDevice(seed, prefer)
    bank = Bank(layout, device)
    engine = Engine(device, bank, access, *picks_of(case.trace, access), layers, slots)
    planner = Planner(cell.policy, layout, slots, seed=seed)
    run = Run.of(access)
    serve = [Told(engine, g, planner, run, stream=True) for g in range(len(slots))]
    readers = [Reader(device, bank, g, lane) for g, lane in enumerate(engine.lanes)]
    for lane, one, reader in zip(engine.lanes, serve, readers, strict=True):
        lane.compute = reader  # type: ignore[assignment]
        one.reader = reader
    with device.working():
        engine.run(serve, run, begin_step=planner.begin_step)
    device.synchronize()
    assert_as_replayed(run, replayer, cell)
    engine.check_slots(planner)
    return sum(r.reads for r in readers), sum(r.wrong for r in readers)


@pytest.mark.parametrize("prefer", [None, "main", "side"])
@pytest.mark.parametrize("policy", ["lru", "lfu-decay"])
def test_each_layer_computes_with_its_own_experts(prefer: str | None, policy: str) -> None:
    reads = 0
    for number in range(12):
        found, wrong = run_late(number, number, prefer, policy)
        assert wrong == 0, f"trace {number}"
        reads += found
    assert reads > 300


def read_between_uploads(seed: int, prefer: str | None) -> list[int]:
    """One slot gets expert 0, is read, gets expert 1, is read; the host never waits between.

    Returns the first byte that each read found: 10 and 11 if all is in order.
    """
    device = LazyDevice(seed, prefer)
    torch = device.torch
    pool = SlotPool(device, [(4,)], [torch.uint8], slots=1)
    pool.tensors[0].zero_()
    source = Source([torch.tensor([[10] * 4, [11] * 4], dtype=torch.uint8)])
    found: list[int] = []
    with device.working():
        for expert in (0, 1):
            pool.begin()
            with device.on(device.side):
                pool.upload(source, expert, 0)
            pool.end()
            device.give(device.main, lambda: found.append(int(pool.tensors[0][0, 0])))
        device.synchronize()
    return found


RUNS = [(seed, prefer) for seed in range(10) for prefer in (None, "main", "side")]


def test_a_slot_is_filled_after_its_readers_and_before_the_next() -> None:
    assert {tuple(read_between_uploads(*run)) for run in RUNS} == {(10, 11)}


@pytest.mark.parametrize("lost", ["begin", "end"])
def test_a_missing_wait_is_found(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else the tests here would prove nothing."""
    monkeypatch.setattr(SlotPool, lost, lambda self: None)
    found = {tuple(read_between_uploads(*run)) for run in RUNS}
    assert found - {(10, 11)}


def test_compute_that_does_not_wait_for_uploads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "end", lambda self: None)
    with pytest.raises(AssertionError, match=r"before it was there|wrong"):
        for number in range(20):
            assert run_late(number, number, "main", "lru")[1] == 0, "wrong bytes"


def test_ids_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LazyDevice, "finish", lambda self, event: None)
    with pytest.raises(
        Exception, match=r"differs from the replayer's|before it was there|internal"
    ):
        for number in range(20):
            run_late(number, number, None, "lru")
