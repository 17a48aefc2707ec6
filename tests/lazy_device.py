"""A device that does its work late and in any order that its streams and events allow.

Copies that torch is given inside ``working()`` are put into the queue of the current stream, as on
a GPU. They run when the host waits for an event, one at a time, from whichever stream the random
generator picks among those that are not held by a wait. So a missing wait shows as wrong bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from simlab.live.device import Device


class Token:
    """One recording of an event: done when its stream has come to it."""

    def __init__(self) -> None:
        self.done = False


class Event:
    """An event; waits refer to its last recording, as CUDA's do."""

    def __init__(self) -> None:
        self.token = Token()


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], None] | Token] = deque()


class LazyDevice(Device):
    """See the module. ``prefer``: the stream that runs whenever it can, or None for any."""

    def __init__(self, seed: int, prefer: str | None = None) -> None:
        super().__init__()
        self.main, self.side = Stream("main"), Stream("side")
        self.current = self.main
        self.random, self.prefer = Random(seed), prefer
        self.runs = False

    def give(self, stream: Stream, work: Callable[[], None]) -> None:
        stream.queue.append(work)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def event(self, *, timed: bool = False) -> Any:
        return Event()

    def record(self, event: Any, stream: Any) -> None:
        event.token = token = Token()
        self.give(stream, lambda: setattr(token, "done", True))

    def wait(self, stream: Any, event: Any) -> None:
        stream.queue.append(event.token)

    def finish(self, event: Any) -> None:
        while not event.token.done:
            self._run_one()

    def synchronize(self) -> None:
        while self.main.queue or self.side.queue:
            self._run_one()

    def ms(self, begin: Any, end: Any) -> float:
        assert begin.token.done and end.token.done, "a time was read before it was there"
        return 1.0

    def _run_one(self) -> None:
        free = []
        for stream in (self.main, self.side):
            while stream.queue and isinstance(stream.queue[0], Token) and stream.queue[0].done:
                stream.queue.popleft()
            if stream.queue and not isinstance(stream.queue[0], Token):
                free.append(stream)
        assert free, "every stream waits for another"
        first = [stream for stream in free if stream.name == self.prefer]
        work = (first[0] if first else self.random.choice(free)).queue.popleft()
        assert not isinstance(work, Token)
        self.runs = True
        work()
        self.runs = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Copies are queued in here."""
        device = self

        class Queueing(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if device.runs or str(func.overloadpacket) != "aten.copy_":
                    return func(*args, **(kwargs or {}))
                device.give(device.current, lambda: func(*args, **(kwargs or {})))
                return args[0]

        with Queueing():
            yield
