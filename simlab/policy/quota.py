"""A quota of slots for each layer: layers take from themselves, and back what others hold too much.

The slots are dealt evenly, the first layers getting one more where they do not divide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit


class Quota(NamedTuple):
    """``due``, ``held``: int64 [layers], slots that a layer may hold and holds."""

    due: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]


def new_quota(n_layers: int, slots: int) -> Quota:
    """Nothing held."""
    due = np.full(n_layers, slots // n_layers, np.int64)
    due[: slots % n_layers] += 1
    return Quota(due=due, held=np.zeros(n_layers, np.int64))


@kernel_jit
def quota_victim(quota: Any, cache: Any, group: Any, key: int, leaver: Any, state: Any) -> Any:
    """The leaver of the missing key's own layer once that holds its quota; otherwise, and if the
    layer has none, the leaver of the layer that exceeds its quota most (ties: the lowest layer).

    Args:
        key: the missing key, or negative when there is none (``bmoe``).
        leaver: (state, cache, group, layer) -> the key to leave in a layer, never a present member,
            or -1.
    """
    own = np.int64(key) // group.experts if key >= 0 else np.int64(-1)
    if own >= 0 and quota.held[own] >= quota.due[own]:
        chosen = leaver(state, cache, group, own)
        if chosen >= 0:
            return np.int64(chosen)
    best = np.int64(-1)
    most = np.int64(0)
    for layer in range(group.layers):
        excess = quota.held[layer] - quota.due[layer]
        if best < 0 or excess > most:
            chosen = leaver(state, cache, group, layer)
            if chosen >= 0:
                best = np.int64(chosen)
                most = excess
    return best
