"""Times are right where the clock ticks: some systems count processor time in steps of 10 ms."""

from __future__ import annotations

import time

import pytest

from simlab.analysis import policy_check, stopwatch

TICK = 0.01


class Machine:
    """A processor that does nothing else; its clock shows whole ticks only."""

    def __init__(self) -> None:
        self.now = 0.004

    def work(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> float:
        return self.now // TICK * TICK


@pytest.mark.parametrize("seconds", [0.0003, 0.003, 0.0099, 0.07, 0.5])
def test_a_run_shorter_than_a_tick_is_measured(seconds: float) -> None:
    machine = Machine()
    order: list[str] = []

    def one() -> None:
        order.append("one")
        machine.work(seconds)

    def two() -> None:
        order.append("two")
        machine.work(2 * seconds)

    found = stopwatch.interleaved({"one": one, "two": two}, rounds=3, clock=machine.clock)
    off = TICK / stopwatch.LEAST_SECONDS
    assert found["one"] == pytest.approx(seconds, rel=off)
    assert found["two"] == pytest.approx(2 * seconds, rel=off)
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["one", "two"] * 4


def test_check_has_a_speed_where_the_clock_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: time.perf_counter() // TICK * TICK)
    speeds = policy_check._speeds("fifo")
    assert len(speeds) == 2
    assert all(0 < speed < float("inf") for speed in speeds)
