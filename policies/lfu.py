"""Least frequently used, counted while resident: a key starts at 1 and gains 1 a hit.

The key of the lowest count leaves; among equals the one that reached that count longest ago. Counts
are lost on eviction, so with a shared pool newcomers leave before their layer returns: it locks up.
Buckets of equal count hang in ascending order, so every step is O(1) (Shah, Mitra & Matani 2010).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.policy.linked import Lists, new_lists, push_back, unlink

NAME = "lfu"
VERSION = 1
SOURCE = "Knuth 1968 (frequency counts); Shah, Mitra & Matani 2010, An O(1) algorithm for LFU"


class State(NamedTuple):
    members: Lists  # keys; bucket b has its sentinel at keys + b
    order: Lists  # buckets by ascending count; sentinel at keys + 1
    count: npt.NDArray[np.int64]  # [keys + 1], count that a bucket stands for
    bucket: npt.NDArray[np.int32]  # [keys], bucket of a resident key
    spare: npt.NDArray[np.int32]  # [keys + 1], stack of unused buckets
    n_spare: npt.NDArray[np.int64]  # [1]


def init(geometry, slots, params):
    buckets = geometry.keys + 1
    return State(
        members=new_lists(geometry.keys, buckets),
        order=new_lists(buckets, 1),
        count=np.zeros(buckets, np.int64),
        bucket=np.zeros(geometry.keys, np.int32),
        spare=np.arange(buckets, dtype=np.int32),
        n_spare=np.array([buckets], np.int64),
    )


def join(state, group, key, before, count):
    """Put a key into the bucket of `count`, which stands right after bucket `before` if any."""
    first = group.keys + 1
    bucket = state.order.next[before]
    if bucket == first or state.count[bucket] != count:
        state.n_spare[0] -= 1
        new = state.spare[state.n_spare[0]]
        state.count[new] = count
        state.order.prev[new] = before
        state.order.next[new] = bucket
        state.order.next[before] = new
        state.order.prev[bucket] = new
        bucket = new
    push_back(state.members, group.keys + bucket, key)
    state.bucket[key] = bucket


def drop_if_empty(state, group, bucket):
    sentinel = group.keys + bucket
    if state.members.next[sentinel] == sentinel:
        unlink(state.order, bucket)
        state.spare[state.n_spare[0]] = bucket
        state.n_spare[0] += 1


def on_hit(state, cache, group, key):
    bucket = state.bucket[key]
    unlink(state.members, key)
    join(state, group, key, bucket, state.count[bucket] + 1)
    drop_if_empty(state, group, bucket)


def victim(state, cache, group, key):
    bucket = state.order.next[group.keys + 1]
    while bucket != group.keys + 1:
        candidate = state.members.next[group.keys + bucket]
        while candidate < group.keys:
            if cache.stamp[candidate] != cache.now[0]:
                return candidate
            candidate = state.members.next[candidate]
        bucket = state.order.next[bucket]
    return -1


def on_evict(state, cache, group, key):
    unlink(state.members, key)
    drop_if_empty(state, group, state.bucket[key])


def on_insert(state, cache, group, key):
    join(state, group, key, group.keys + 1, 1)
