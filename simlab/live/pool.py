"""The slots of a group in device memory, and the copies that fill them.

One tensor per expert tensor, [slots + staging, ...]: slot s of every tensor holds one expert. The
staging rows behind the slots take experts that are copied, used once and dropped.

Order on the device, without stopping the host: readers of the old content (``main``) -> copies
(``side``) -> computing on the new content (``main``). All tensors live as long as the pool, so
torch's allocator never hands their memory on while a stream still uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simlab.live.device import Device


class SlotPool:
    """Slots of one group.

    Args:
        shapes: per expert tensor the shape of one expert's, without the slot. dtypes: likewise.
        slots: capacity. staging: rows for streamed experts.

    Attributes:
        tensors: per expert tensor, [slots + staging, *shape] on the device.
        slots, staging: as given.
        copies: copies issued so far. n_bytes: bytes they moved.

    Raises:
        SimlabError: device memory is short.
    """

    def __init__(
        self,
        device: Device,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[Any],
        *,
        slots: int,
        staging: int = 0,
    ) -> None:
        self.device, self.slots, self.staging = device, slots, staging
        rows = slots + staging
        what = f"the slot pool ({slots:,} slots)"
        self.tensors = [
            device.empty((rows, *shape), dtype, what)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        # views made once: the usual copy is of one expert, and must not build new ones
        self._rows = [tensor.unbind(0) for tensor in self.tensors]
        self._row_bytes = sum(t[0].numel() * t.element_size() for t in self.tensors) if rows else 0
        self._read = device.event()
        self._filled = device.event()
        self.copies = 0
        self.n_bytes = 0

    def begin(self) -> None:
        """Uploads given to ``device.side`` from here on wait for what ``main`` was given so far."""
        self.device.record(self._read, self.device.main)
        self.device.wait(self.device.side, self._read)

    def upload(self, source: Source, expert: int, row: int, count: int = 1) -> None:
        """Copy ``count`` neighbouring experts into as many rows, one copy per tensor.

        Call it inside ``device.on(device.side)``, between ``begin`` and ``end``.
        """
        if count == 1:
            for rows, experts in zip(self._rows, source.rows, strict=True):
                rows[row].copy_(experts[expert], non_blocking=True)
        else:
            for tensor, bank in zip(self.tensors, source.tensors, strict=True):
                tensor[row : row + count].copy_(bank[expert : expert + count], non_blocking=True)
        self.copies += len(self.tensors)
        self.n_bytes += count * self._row_bytes

    def move(self, slot: int, row: int) -> None:
        """Copy an expert from one row to another on the device."""
        for rows in self._rows:
            rows[row].copy_(rows[slot], non_blocking=True)

    def end(self) -> None:
        """Work given to ``main`` from here on waits for the uploads given so far."""
        self.device.record(self._filled, self.device.side)
        self.device.wait(self.device.main, self._filled)


class Source:
    """The experts of one layer in host memory: tensors [n_expert, ...], their rows made once."""

    __slots__ = ("rows", "tensors")

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = list(tensors)
        self.rows = [tensor.unbind(0) for tensor in self.tensors]
