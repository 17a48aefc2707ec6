"""Which of several devices a layer is assigned to, and each device's share of the budget.

llama.cpp cuts the layers, and the output as one more, at the running sums of the tensor split, in
32-bit floats (load_tensors in src/llama-model.cpp). Without a tensor split the split is that of the
devices' free memory. All layers are taken to be offloaded (-ngl 99).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence

from simlab.errors import UsageError


def check_split(split: Sequence[float]) -> None:
    """Raise UsageError unless the numbers can be a tensor split."""
    if not split or any(not 0 <= part < 1e30 for part in split) or not sum(split) > 0:
        raise UsageError(
            "--tensor-split takes a number for each device, 0 or more, such as 3,1; not"
            f" {','.join(f'{part:g}' for part in split)}"
        )


def devices_of_layers(n_layers: int, split: Sequence[float]) -> list[int]:
    """Device of each layer.

    Args:
        n_layers: all layers of the model. split: share of each device, not normalised.

    Raises:
        UsageError: the split is no split.
    """
    check_split(split)
    total = 0.0
    running = []
    for part in split:
        total = _single(total + _single(part))
        running.append(total)
    ends = [_single(end / total) for end in running]
    # a share that rounding left below 1 would send the last layers past the last device
    last = len(split) - 1
    return [
        min(bisect_right(ends, _single(layer / (n_layers + 1))), last) for layer in range(n_layers)
    ]


def _single(number: float) -> float:
    """Rounded to a 32-bit float."""
    result: float = struct.unpack("f", struct.pack("f", number))[0]
    return result
