"""Several queues over keys, each key in at most one: the building block of ARC, 2Q, SLRU, S3-FIFO.

Queues are numbered from 1; 0 is nowhere. All are ordered from the longest to the most recently put.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit
from simlab.policy.linked import Lists, after, first_absent, new_lists, push_back, unlink

NOWHERE = 0


class Queues(NamedTuple):
    """``where``: uint8 [keys], the queue a key is in; ``size``: int64 [queues + 1]."""

    lists: Lists
    where: npt.NDArray[np.uint8]
    size: npt.NDArray[np.int64]


def new_queues(n_keys: int, n_queues: int) -> Queues:
    """Empty queues 1 .. n_queues."""
    return Queues(
        lists=new_lists(n_keys, n_queues + 1),
        where=np.zeros(n_keys, np.uint8),
        size=np.zeros(n_queues + 1, np.int64),
    )


@kernel_jit
def put(queues: Queues, group: Any, key: int, queue: int) -> None:
    """Take a key from where it is and put it at the recent end of a queue (or NOWHERE)."""
    unlink(queues.lists, key)
    queues.size[queues.where[key]] -= 1
    queues.where[key] = queue
    queues.size[queue] += 1
    if queue != NOWHERE:
        push_back(queues.lists, group.keys + queue, key)


@kernel_jit
def enter(queues: Queues, group: Any, key: int, queue: int) -> None:
    """As ``put``, in fewer steps, for a key that is nowhere."""
    push_back(queues.lists, group.keys + queue, key)
    queues.where[key] = queue
    queues.size[queue] += 1


@kernel_jit
def leave(queues: Queues, key: int, queue: int) -> None:
    """Take a key out of ``queue``, where it is."""
    unlink(queues.lists, key)
    queues.where[key] = NOWHERE
    queues.size[queue] -= 1


@kernel_jit
def oldest(queues: Queues, group: Any, queue: int) -> Any:
    """The key that was put first; ask only a queue that is not empty."""
    return after(queues.lists, group.keys + queue)


@kernel_jit
def oldest_absent(queues: Queues, cache: Any, group: Any, queue: int) -> Any:
    """The key that was put first and is not in the present access set, or -1."""
    return first_absent(queues.lists, cache, group.keys, group.keys + queue)


@kernel_jit
def promote(
    queues: Queues, group: Any, key: int, probation: int, protected: int, most: int
) -> None:
    """A key was used again: protect it; the oldest of more than ``most`` goes back on probation."""
    put(queues, group, key, protected)
    if queues.size[protected] > most:
        put(queues, group, oldest(queues, group, protected), probation)
