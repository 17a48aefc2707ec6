"""Pinning by frequency: now and then the most used keys of each layer are pinned, the others not.

Uses of all keys are counted and halved at each re-pin. The block of `pinned-lru` and `repin`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit
from simlab.policy.protocol import Param
from simlab.policy.queues import NOWHERE, Queues, new_queues, oldest_absent, put

INTERVAL = Param(256, low=1, high=1e9, doc="tokens between two re-pins (whole number)")
LOOSE = 1  # resident, not pinned; least recent first
FAST = 2  # resident and pinned


class Pins(NamedTuple):
    """``uses``: float64 [keys]; ``pinned``: bool [keys], resident or not; ``since``: int64 [1],
    tokens since the last re-pin; ``interval``: tokens; ``hot``: keys to pin in each layer.
    """

    resident: Queues
    uses: npt.NDArray[np.float64]
    pinned: npt.NDArray[np.bool_]
    since: npt.NDArray[np.int64]
    interval: int
    hot: int


def new_pins(n_keys: int, interval: int, hot: int) -> Pins:
    """Nothing used, nothing pinned."""
    return Pins(
        resident=new_queues(n_keys, 2),
        uses=np.zeros(n_keys),
        pinned=np.zeros(n_keys, np.bool_),
        since=np.zeros(1, np.int64),
        interval=interval,
        hot=hot,
    )


@kernel_jit
def _repin(pins: Any, group: Any) -> None:
    """Pin the ``hot`` most used keys of each layer (ties: lowest expert; never an unused one)."""
    for key in range(group.keys):
        pins.pinned[key] = False
    for layer in range(group.layers):
        base = layer * group.experts
        for _ in range(min(pins.hot, group.experts)):
            best = -1
            for key in range(base, base + group.experts):
                if not pins.pinned[key] and pins.uses[key] > 0.0:
                    if best < 0 or pins.uses[key] > pins.uses[best]:
                        best = key
            if best >= 0:
                pins.pinned[best] = True
    for key in range(group.keys):
        pins.uses[key] *= 0.5
        if pins.resident.where[key] != NOWHERE:
            settle(pins, group, key, False)


@kernel_jit
def settle(pins: Any, group: Any, key: int, used: bool) -> None:
    """Put a resident key where it belongs: to the recent end, or to its place if not ``used``."""
    queue = FAST if pins.pinned[key] else LOOSE
    if used or pins.resident.where[key] != queue:
        put(pins.resident, group, key, queue)


@kernel_jit
def pins_step(pins: Any, group: Any, tokens: int) -> None:
    """A step begins: re-pin once ``interval`` tokens were computed since the last time."""
    if pins.since[0] >= pins.interval:
        pins.since[0] = 0
        _repin(pins, group)
    pins.since[0] += tokens


@kernel_jit
def pins_uses(pins: Any, group: Any, layer: int, experts: Any) -> None:
    """Count the uses of an access set."""
    for expert in experts:
        pins.uses[layer * group.experts + expert] += 1.0


@kernel_jit
def pins_victim(pins: Any, cache: Any, group: Any) -> Any:
    """The least recent key that is neither pinned nor present, else the least recent pinned one."""
    chosen = oldest_absent(pins.resident, cache, group, LOOSE)
    if chosen < 0:
        chosen = oldest_absent(pins.resident, cache, group, FAST)
    return chosen
