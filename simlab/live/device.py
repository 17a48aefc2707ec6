"""Where experts are uploaded to: a CUDA (or ROCm) GPU, or ordinary memory that stands in for one.

Both have one interface, so all that is built on it runs and is tested without a GPU:

- memory: ``empty`` on the device, ``pinned`` and ``pageable`` on the host;
- order: two streams, ``main`` (compute) and ``side`` (uploads), events, and waits between streams
  that do not stop the host;
- time: ``ms`` between two timed events.

On ``cpu`` a copy is done when the call returns, events are readings of the clock and waits are
nothing. What it measures is a host memory copy, not PCIe, and ``note`` says so.
"""

from __future__ import annotations

import mmap
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from simlab.errors import SimlabError, UsageError
from simlab.live.need import need_torch

MIB = 2**20


class Device:
    """Ordinary memory as a device; the GPU overrides what differs.

    Attributes:
        kind: "cpu" or "cuda". name: the hardware's name. note: to be printed beside every figure;
            empty on a GPU.
        torch: the module. main, side: streams; None on ``cpu``.
    """

    kind = "cpu"
    note = "host memory copy, not PCIe"

    def __init__(self) -> None:
        self.torch: Any = need_torch("live")
        self.place: Any = self.torch.device("cpu")
        self.name = _cpu_name()
        self.main: Any = None
        self.side: Any = None

    # ---- memory ---------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: Any, what: str) -> Any:
        """A tensor on the device, not initialised.

        Raises:
            SimlabError: it does not fit; ``what`` is named.
        """
        need = size_of(shape, dtype)
        free = self.free_memory()
        if free is not None and need > free:
            raise self._full(what, need)
        try:
            return self.torch.empty(tuple(shape), dtype=dtype, device=self.place)
        except (RuntimeError, MemoryError):  # torch's out-of-memory errors are RuntimeErrors
            raise self._full(what, need) from None

    def pinned(self, shape: Sequence[int], dtype: Any, what: str) -> Any:
        """A tensor in host memory that the device can read on its own.

        Raises:
            SimlabError: it does not fit, or cannot be pinned; ``what`` is named.
        """
        return self.pageable(shape, dtype, what)

    def pageable(self, shape: Sequence[int], dtype: Any, what: str) -> Any:
        """A tensor in ordinary host memory, page-aligned; freed with its last reference.

        Raises:
            SimlabError: it does not fit; ``what`` is named.
        """
        need = size_of(shape, dtype)
        free = host_memory()
        message = (
            f"{what} takes {mib(need)} of host memory, {mib(free or 0)} are free; take a smaller"
            " --bank-fraction, or end other programs"
        )
        if free is not None and need > free:
            raise SimlabError(message)
        try:
            memory = mmap.mmap(-1, need)
        except (OSError, OverflowError, ValueError):
            raise SimlabError(message) from None
        return self.torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    def free_memory(self) -> int | None:
        """Bytes of device memory that are free; None when unknown."""
        return host_memory()

    def _full(self, what: str, need: int) -> SimlabError:
        free = self.free_memory()
        has = "" if free is None else f", {mib(free)} are free"
        return SimlabError(
            f"{what} takes {mib(need)} of memory on {self.name}{has}; take fewer --slots"
        )

    # ---- order ----------------------------------------------------------------------------------

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work inside goes to ``stream``."""
        return nullcontext()

    def event(self, *, timed: bool = False) -> Any:
        """A new event; ``timed`` ones can be given to ``ms``."""
        return _Mark()

    def record(self, event: Any, stream: Any) -> None:
        """The event happens when the work given to ``stream`` so far is done."""
        event.time = time.perf_counter()

    def wait(self, stream: Any, event: Any) -> None:
        """Later work on ``stream`` starts after the event; the host goes on."""

    def finish(self, event: Any) -> None:
        """The host waits for the event."""

    def synchronize(self) -> None:
        """The host waits for everything."""

    def ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two timed events, both of which have happened."""
        return float(end.time - begin.time) * 1e3

    def close(self) -> None:
        """Wait for work under way and give back memory; tensors of the device are dead then."""


class _Mark:
    """An event on the CPU: when it was recorded."""

    __slots__ = ("time",)

    def __init__(self) -> None:
        self.time = 0.0


@contextmanager
def open_device(text: str) -> Iterator[Device]:
    """The device of that name, closed at the end: ``cpu``, ``cuda``, ``cuda:1``.

    Raises:
        UsageError: no such device, or torch is not installed.
    """
    kind, colon, index = text.partition(":")
    if kind == "cpu" and not colon:
        device = Device()
    elif kind == "cuda" and (not colon or (index.isdecimal() and len(index) < 4)):
        from simlab.live.cuda import CudaDevice

        device = CudaDevice(int(index) if colon else None)
    else:
        raise UsageError(f"--device takes cpu, cuda or cuda:N, not {text!r}")
    try:
        yield device
    finally:
        device.close()


@contextmanager
def one_thread(device: Device) -> Iterator[None]:
    """Copies of the ``cpu`` device by one thread: several would wait for each other, and on a busy
    machine that waiting is what would be measured.
    """
    if device.kind != "cpu":
        yield
        return
    threads = device.torch.get_num_threads()
    device.torch.set_num_threads(1)
    try:
        yield
    finally:
        device.torch.set_num_threads(threads)


def host_memory() -> int | None:
    """Bytes of host memory that can still be taken, or None where /proc does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    free = kib.get("MemAvailable")
    if free is None:
        return None
    try:  # a container may have less than the machine
        root = Path("/sys/fs/cgroup")
        most = (root / "memory.max").read_text(encoding="ascii").strip()
        if most != "max":
            used = int((root / "memory.current").read_text(encoding="ascii"))
            stat = (root / "memory.stat").read_text(encoding="ascii").splitlines()
            cached = sum(int(x.split()[1]) for x in stat if x.startswith("inactive_file "))
            return max(0, min(free * 1024, int(most) - used + cached))
    except (OSError, ValueError, IndexError):
        pass
    return free * 1024


def size_of(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of a tensor."""
    need = int(dtype.itemsize)
    for n in shape:
        need *= int(n)
    return need


def mib(size: int) -> str:
    """Bytes as an amount of MiB to be read."""
    return f"{size / MIB:,.0f} MiB" if size >= 10 * MIB else f"{size / MIB:.2f} MiB"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
