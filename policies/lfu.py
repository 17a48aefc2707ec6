"""Least frequently used, counted while resident: a key starts at 1 and gains 1 a hit.

The key of the lowest count leaves; among equals the one that reached that count longest ago, and
present members are passed over. Counts are lost on eviction, so with a shared pool newcomers leave
before their layer returns: it locks up. Buckets of equal count hang in ascending order, so every
step is O(1).
"""

from typing import NamedTuple

from simlab.policy.counts import (
    Counts,
    count_up,
    least_counted,
    new_counts,
    start_count,
    stop_count,
)

NAME = "lfu"
VERSION = 1
SOURCE = "Knuth 1968 (frequency counts); Shah, Mitra & Matani 2010, An O(1) algorithm for LFU"


class State(NamedTuple):
    counts: Counts


def init(geometry, slots, params):
    return State(counts=new_counts(geometry.keys))


def on_hit(state, cache, group, key):
    count_up(state.counts, group, key)


def victim(state, cache, group, key):
    return least_counted(state.counts, cache, group)


def on_evict(state, cache, group, key):
    stop_count(state.counts, group, key)


def on_insert(state, cache, group, key):
    start_count(state.counts, group, key)
