"""Keys in buckets of equal use count, in ascending order: every step O(1) (Shah, Mitra & Matani).

Among keys of one count the one that reached it longest ago comes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.jit import kernel_jit
from simlab.policy.linked import (
    Lists,
    after,
    before,
    first_absent,
    insert_after,
    move_back,
    new_lists,
    unlink,
)


class Counts(NamedTuple):
    """``members``: keys, bucket b has its sentinel at keys + b; ``order``: buckets by ascending
    count, sentinel at keys + 1; ``level``: int64 [keys + 1], what a bucket stands for; ``bucket``:
    uint32 [keys], bucket of a counted key; ``spare``, ``n_spare``: stack of unused buckets.
    """

    members: Lists
    order: Lists
    level: npt.NDArray[np.int64]
    bucket: npt.NDArray[np.uint32]
    spare: npt.NDArray[np.uint32]
    n_spare: npt.NDArray[np.int64]


def new_counts(n_keys: int) -> Counts:
    """No key counted."""
    buckets = n_keys + 1
    return Counts(
        members=new_lists(n_keys, buckets),
        order=new_lists(buckets, 1),
        level=np.zeros(buckets, np.int64),
        bucket=np.zeros(n_keys, np.uint32),
        spare=np.arange(buckets, dtype=np.uint32),
        n_spare=np.array([buckets], np.int64),
    )


@kernel_jit
def _join(counts: Any, group: Any, key: int, left: int, count: int) -> None:
    """Move a key into the bucket of ``count``, which stands right after bucket ``left`` if any."""
    first = group.keys + 1
    bucket = after(counts.order, left)
    if bucket == first or counts.level[bucket] != count:
        counts.n_spare[0] -= 1
        new = counts.spare[counts.n_spare[0]]
        counts.level[new] = count
        insert_after(counts.order, left, new)
        bucket = new
    move_back(counts.members, group.keys + bucket, key)
    counts.bucket[key] = bucket


@kernel_jit
def _drop_if_empty(counts: Any, group: Any, bucket: int) -> None:
    sentinel = group.keys + bucket
    if after(counts.members, sentinel) == sentinel:
        unlink(counts.order, bucket)
        counts.spare[counts.n_spare[0]] = bucket
        counts.n_spare[0] += 1


@kernel_jit
def start_count(counts: Any, group: Any, key: int) -> None:
    """Count a new key once."""
    _join(counts, group, key, group.keys + 1, 1)


@kernel_jit
def count_up(counts: Any, group: Any, key: int) -> None:
    """Count a key once more."""
    bucket = counts.bucket[key]
    count = counts.level[bucket] + 1
    following = after(counts.order, bucket)
    alone = before(counts.members, key) == after(counts.members, key)  # both are the sentinel
    if alone and (following == group.keys + 1 or counts.level[following] != count):
        counts.level[bucket] = count  # its bucket goes up with it
        return
    _join(counts, group, key, bucket, count)
    _drop_if_empty(counts, group, bucket)


@kernel_jit
def stop_count(counts: Any, group: Any, key: int) -> None:
    """Forget a key."""
    unlink(counts.members, key)
    _drop_if_empty(counts, group, counts.bucket[key])


@kernel_jit
def least_counted(counts: Any, cache: Any, group: Any) -> Any:
    """The first key of the lowest count that is not in the present set, or -1."""
    bucket = after(counts.order, group.keys + 1)
    while bucket != group.keys + 1:
        candidate = first_absent(counts.members, cache, group.keys, group.keys + bucket)
        if candidate >= 0:
            return candidate
        bucket = after(counts.order, bucket)
    return np.int64(-1)
