"""A stand-in for the experts' compute: every byte of every used expert is read and multiplied.

A layout knows bytes, not the arithmetic of a quantised format, so the bytes of a tensor are taken
for a matrix of half-precision numbers (single on ``cpu``) and multiplied with one vector per
expert, as decoding does. It gathers the used rows first, so it reads each byte once more than a
fused kernel would. What it computes means nothing; it keeps the device as busy as a layer might.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

from simlab.errors import UsageError
from simlab.live.device import Device
from simlab.live.pool import SlotPool

_WIDEST = 2048


class StandIn:
    """The stand-in of one group. All its buffers are made here.

    Args:
        sizes: bytes of one expert per tensor. most: experts of the largest access set.

    Raises:
        UsageError: a tensor's bytes are no whole numbers of that precision.
        SimlabError: device memory is short.
    """

    def __init__(self, device: Device, pool: SlotPool, sizes: Sequence[int], most: int) -> None:
        torch = device.torch
        dtype = torch.float16 if device.kind == "cuda" else torch.float32
        self._torch = torch
        self._rows = device.empty((most,), torch.int64, "slot numbers")
        self._parts: list[tuple[Any, Any, Any, Any]] = []
        for tensor, size in zip(pool.tensors, sizes, strict=True):
            if size % dtype.itemsize:
                raise UsageError(
                    f"--compute needs experts of whole {dtype} numbers, a tensor here has {size}"
                    " bytes; leave out --compute"
                )
            n = size // dtype.itemsize
            width = gcd(n, _WIDEST)
            weights = tensor.view(dtype).view(tensor.shape[0], n // width, width)
            what = "the stand-in compute"
            gathered = device.empty((most, n // width, width), dtype, what)
            vector = device.empty((most, width, 1), dtype, what).fill_(1)
            result = device.empty((most, n // width, 1), dtype, what)
            self._parts.append((weights, gathered, vector, result))

    def __call__(self, rows: Any, n: int) -> None:
        """Compute with the first ``n`` of ``rows`` (int64, pinned host memory), on ``main``."""
        if n == 0:
            return
        torch = self._torch
        # the host does not write `rows` again before it has waited for the next layer's ids
        self._rows[:n].copy_(rows[:n], non_blocking=True)
        for weights, gathered, vector, result in self._parts:
            torch.index_select(weights, 0, self._rows[:n], out=gathered[:n])
            torch.bmm(gathered[:n], vector[:n], out=result[:n])
