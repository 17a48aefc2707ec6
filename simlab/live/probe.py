"""Bandwidth and latency of the link by copy size, checked: every byte compared, every rate bounded.

A case is a size, a kind of host memory, one copy or many, with or without compute beside it. One
copy is timed by the host, from giving it to the device until it is known to be done: its latency as
an engine feels it. Many are queued one behind the other and timed by events on the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from simlab.cost.link import LinkProfile, fit_link
from simlab.errors import UsageError
from simlab.live.bank import content
from simlab.live.device import MIB, Device, one_thread
from simlab.live.link_limit import link_limit

SIZES = tuple(4096 * 4**i for i in range(9))  # 4 KiB .. 256 MiB
QUICK_SIZES = (64 * 1024, MIB, 16 * MIB, 64 * MIB)
#: Copies of a case with many: as many as fit the buffer, within these bounds.
_FEWEST, _MOST = 2, 64
#: Rates may be this much above the limit before they are called wrong: clocks are not exact.
_TOLERANCE = 1.02
_IDS = 8


def probe(
    device: Device,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
    memories: Sequence[str] = ("pinned", "pageable"),
    compute: Sequence[bool] = (False, True),
    limit_gb_s: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> LinkProfile:
    """Measure the link of a device.

    Args:
        sizes: bytes a copy. rounds: times each case is measured; medians are reported.
        limit_gb_s: what the link can carry; asked of the system by default.
        progress: called with the number of cases done since the last call.

    Raises:
        UsageError: a size or the number of rounds is not allowed.
        SimlabError: memory is short, or the times make no sense.
    """
    with one_thread(device):
        return _probe(device, sizes, rounds, memories, compute, limit_gb_s, progress)


def _probe(
    device: Device,
    sizes: Sequence[int],
    rounds: int,
    memories: Sequence[str],
    compute: Sequence[bool],
    limit_gb_s: float | None,
    progress: Callable[[int], None] | None,
) -> LinkProfile:
    if rounds < 1 or not sizes or min(sizes) < 8 or any(size % 8 for size in sizes):
        raise UsageError("--rounds must be 1 or more, and sizes multiples of 8 bytes")
    torch = device.torch
    room = max(sizes)
    expected = device.empty((room,), torch.uint8, "the expected bytes")
    expected.copy_(content(device, room, 0, 0, 0))
    target = device.empty((room,), torch.uint8, "the probe's buffer")
    limit, source = link_limit(device)
    if limit_gb_s is not None:
        limit, source = limit_gb_s, "given"
    points: list[dict[str, Any]] = []
    problems: list[str] = []
    for memory in memories:
        host = getattr(device, memory)((room,), torch.uint8, f"the probe's {memory} buffer")
        host.copy_(expected)
        for size in sizes:
            for copies in (1, max(_FEWEST, min(_MOST, room // size))):
                for busy in compute:
                    target.zero_()
                    device.synchronize()
                    with _busy(device, busy):
                        seconds = [_time(device, host, target, size, copies) for _ in range(rounds)]
                    point = _point(memory, size, copies, busy, seconds)
                    points.append(point)
                    problems += _problems(device, point, expected, target, limit)
                    if progress is not None:
                        progress(1)
        del host
    queued = [
        p for p in points if p["memory"] == memories[0] and p["copies"] > 1 and not p["compute"]
    ]
    bandwidth, latency = fit_link([p["size"] for p in queued], [p["us"] / 1e6 for p in queued])
    return LinkProfile(
        device=device.kind,
        name=device.name,
        note=device.note,
        peak_gb_s=max(p["gb_s"] for p in queued),
        bandwidth_gb_s=bandwidth,
        latency_us=latency,
        ids_wait_us=_ids_wait(device),
        limit_gb_s=limit,
        limit_source=source,
        valid=not problems,
        problems=tuple(problems),
        points=points,
    )


def quick_probe(device: Device) -> LinkProfile:
    """The least that predictions need: a few sizes of pinned copies, about a second."""
    return probe(device, sizes=QUICK_SIZES, rounds=3, memories=("pinned",), compute=(False,))


def n_cases(sizes: Sequence[int] = SIZES) -> int:
    """Cases of a probe with the other arguments left as they are."""
    return len(sizes) * 8


def _time(device: Device, host: Any, target: Any, size: int, copies: int) -> float:
    """Seconds per copy."""
    places = [i % (len(target) // size) * size for i in range(copies)]
    begin, end = device.event(timed=True), device.event(timed=True)
    started = time.perf_counter()
    with device.on(device.side):
        device.record(begin, device.side)
        for at in places:
            target[at : at + size].copy_(host[at : at + size], non_blocking=True)
        device.record(end, device.side)
    device.finish(end)
    if copies == 1:
        return time.perf_counter() - started
    return device.ms(begin, end) / 1e3 / copies


def _point(memory: str, size: int, copies: int, busy: bool, seconds: list[float]) -> dict[str, Any]:
    us = [1e6 * max(s, 1e-9) for s in seconds]
    rates = [size / each / 1e3 for each in us]
    return {
        "memory": memory,
        "size": size,
        "copies": copies,
        "compute": busy,
        "us": median(us),
        "gb_s": median(rates),
        "low_gb_s": min(rates),
        "high_gb_s": max(rates),
        "rounds": len(us),
    }


def _problems(
    device: Device, point: dict[str, Any], expected: Any, target: Any, limit: float | None
) -> list[str]:
    """Why a case cannot be believed."""
    what = f"{point['copies']} x {point['size']:,} bytes, {point['memory']}"
    found = []
    sent = point["size"] * min(point["copies"], len(target) // point["size"])
    if not device.torch.equal(target[:sent], expected[:sent]):
        found.append(f"{what}: the bytes that arrived are not those that were sent")
    if limit is not None and point["high_gb_s"] > limit * _TOLERANCE:
        found.append(f"{what}: {point['high_gb_s']:.1f} GB/s over a link of {limit:.1f} GB/s")
    return found


@contextmanager
def _busy(device: Device, wanted: bool) -> Iterator[None]:
    """Matrix products on the device beside the copies: on ``main``, fed by a thread of its own."""
    if not wanted:
        yield
        return
    torch = device.torch
    n, dtype = (256, torch.float32) if device.kind == "cpu" else (4096, torch.float16)
    matrix = device.empty((n, n), dtype, "the probe's compute").fill_(0.01)
    result = device.empty((n, n), dtype, "the probe's compute")
    stop = threading.Event()
    failed: list[BaseException] = []
    running = threading.Event()

    def work() -> None:
        done = device.event()
        try:
            with device.on(device.main):
                while not stop.is_set():
                    for _ in range(4):  # enough to go on while the next are queued
                        torch.mm(matrix, matrix, out=result)
                    device.record(done, device.main)
                    running.set()
                    device.finish(done)
        except BaseException as exc:
            failed.append(exc)
            running.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        running.wait()
        yield
    finally:
        stop.set()
        thread.join()
        device.synchronize()
    if failed:
        raise failed[0]


def _ids_wait(device: Device, times: int = 200) -> float:
    """Microseconds, median: router ids of one token to the host, and the host waiting for them."""
    there = device.empty((_IDS,), device.torch.int64, "router ids").zero_()
    here = device.pinned((_IDS,), device.torch.int64, "router ids")
    ready = device.event()
    found = []
    for _ in range(times):
        started = time.perf_counter()
        here.copy_(there, non_blocking=True)
        device.record(ready, device.main)
        device.finish(ready)
        found.append(1e6 * (time.perf_counter() - started))
    return median(found)
