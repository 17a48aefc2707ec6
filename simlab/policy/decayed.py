"""LRFU's combined recency and frequency: exponentially decayed use counts, O(1) a use.

All counts decay alike, so the order of two untouched keys never changes: the logarithm of a key's
count, referred to time 0, is kept and changes only when the key is used. Kept for all keys,
resident or not.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit
from simlab.policy.lowest import Lowest, new_lowest, visit
from simlab.policy.protocol import Param

HALF_LIFE = Param(16.0, low=0.01, high=1e9, doc="tokens after which a count is halved")


class Decayed(NamedTuple):
    """``faded``: float64 [keys], at the key's last use; ``used``: int64 [keys], token of that use;
    ``rank``: float64 [keys], ln(faded) + used x rate, -inf before the first use; ``clock``: int64
    [1], tokens so far; ``rate``: ln 2 over the half-life in tokens.
    """

    faded: npt.NDArray[np.float64]
    used: npt.NDArray[np.int64]
    rank: npt.NDArray[np.float64]
    clock: npt.NDArray[np.int64]
    rate: float
    lowest: Lowest


def new_decayed(n_keys: int, n_layers: int, half_life: float) -> Decayed:
    """No key used yet."""
    return Decayed(
        faded=np.zeros(n_keys),
        used=np.zeros(n_keys, np.int64),
        rank=np.full(n_keys, -np.inf),
        clock=np.zeros(1, np.int64),
        rate=math.log(2.0) / half_life,
        lowest=new_lowest(n_layers),
    )


@kernel_jit
def decayed_uses(decayed: Any, group: Any, layer: int, experts: Any) -> None:
    """The access set of a layer is used."""
    visit(decayed.lowest, layer)
    now = decayed.clock[0]
    for expert in experts:
        key = layer * group.experts + expert
        left = decayed.faded[key] * math.exp((decayed.used[key] - now) * decayed.rate)
        decayed.faded[key] = 1.0 + left
        decayed.used[key] = now
        decayed.rank[key] = math.log(1.0 + left) + now * decayed.rate
