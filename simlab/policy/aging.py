"""Counted uses that age: priority = uses x worth + age, where the age is the last victim's
priority.

What has not been used for long is overtaken by newcomers, without touching every key (the dynamic
aging of Arlitt et al. 1999). The block of LFU-DA and GDSF.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit
from simlab.policy.lowest import Lowest, left, new_lowest


class Aging(NamedTuple):
    """``uses``: int64 [keys], since the upload; ``priority``: float64 [keys]; ``age``: float64 [1];
    ``worth``: float64 [layers], of one use of a key of the layer.
    """

    uses: npt.NDArray[np.int64]
    priority: npt.NDArray[np.float64]
    age: npt.NDArray[np.float64]
    worth: npt.NDArray[np.float64]
    lowest: Lowest


def new_aging(n_keys: int, worth: npt.NDArray[np.float64]) -> Aging:
    """Nothing resident; ``worth``: float64 [layers]."""
    return Aging(
        uses=np.zeros(n_keys, np.int64),
        priority=np.zeros(n_keys),
        age=np.zeros(1),
        worth=worth,
        lowest=new_lowest(len(worth)),
    )


@kernel_jit
def aged_use(aging: Any, group: Any, key: int) -> None:
    """A resident key was used."""
    aging.uses[key] += 1
    aging.priority[key] = aging.age[0] + aging.uses[key] * aging.worth[key // group.experts]


@kernel_jit
def aged_start(aging: Any, group: Any, key: int) -> None:
    """A key was given a slot."""
    aging.uses[key] = 0
    aged_use(aging, group, key)


@kernel_jit
def aged_out(aging: Any, group: Any, key: int) -> None:
    """A key was evicted: everyone else grows older."""
    aging.age[0] = aging.priority[key]
    left(aging.lowest, group, key)
