"""The policy protocol: what a policy file declares and what its functions are given.

A policy is one Python file with module constants and plain functions; the replayer compiles the
functions with numba and calls them from one generic kernel. Policies think in *keys*: key =
layer_in_group * experts + expert, 0 <= key < group.keys. Slots are the kernel's business. Hooks get
keys as uint32 (numba then skips its check for negative indices): subtract only after np.int64(key).

Constants of a policy file::

    NAME = "lru"                 # as typed after --policy
    VERSION = 1                  # raise it when results change; printed as lru@1
    SOURCE = "Denning 1968"      # where the idea was published
    PARAMS = {"half_life": Param(16.0, low=0.1, high=1e6, doc="tokens")}
    NEEDS = ()                   # any of NEEDS below
    BOUND = False                # True: a bound, not a policy an engine could run
    DECLINES = False             # True: has admit(); needs an engine change

Functions (``init`` and ``victim`` are required). ``init`` is ordinary Python and returns a
NamedTuple of arrays and numbers; all others are compiled and change the arrays in place::

    init(geometry, slots, params) -> State
    on_step(state, cache, group, tokens)           # a step begins; tokens computed together
    on_set(state, cache, group, layer, experts)    # access set known, before hits and misses
    on_hit(state, cache, group, key)               # a member is resident; first-seen order
    on_miss(state, cache, group, key)              # a member is not, before anything is evicted
    victim(state, cache, group, key) -> key        # who leaves for `key`; never a present member
    admit(state, cache, group, key, victim) -> bool  # fill? victim = -1 while a slot is empty
    on_evict(state, cache, group, key)             # that key has left
    on_insert(state, cache, group, key)            # that key has been given a slot

on_step is called before the first access set that a step has in the policy's group, and only if
the step takes the cached path. Order within an access set: on_set; on_hit for every resident
member; then for each missing member in ascending expert id: on_miss, victim (when full), admit,
on_evict, on_insert. A ``victim`` next to an ``admit`` must not change state: the answer may be
declined.
Under the ``bmoe`` semantics insertion comes first: on_hit or on_miss + on_insert for every member
in the order of their last picks, then victim (with key = -1) and on_evict until the pool fits.
Under the ``sglang`` semantics a policy serves one layer, its first experts are inserted before the
first step, and an access set larger than the pool comes in waves, each a set of its own.
Where the capacity varies, a pool shrinks between two steps: victim (with key = -1, no set being
present) and on_evict until the rest fits; group.slots is always the present capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: Every function a policy may define, with its arguments after (state, cache, group).
HOOKS: dict[str, tuple[str, ...]] = {
    "on_step": ("tokens",),
    "on_set": ("layer", "experts"),
    "on_hit": ("key",),
    "on_miss": ("key",),
    "victim": ("key",),
    "admit": ("key", "victim"),
    "on_evict": ("key",),
    "on_insert": ("key",),
}


#: What a policy may ask for beside the picks; the first two read the future, so only bounds may.
NEEDS: dict[str, str] = {
    "next_use": "cache.next_use",
    "uses": "geometry.uses: cached-path lookups of each key in the whole run, int64 [keys]",
    "weights": "cache.weight: what the router gave the members of the present set",
    "bytes": "geometry.layer_bytes: bytes of one expert, int64 [layers] (all 1 when unknown)",
}
READS_FUTURE = ("next_use", "uses")


@dataclass(frozen=True)
class Param:
    """A tunable number of a policy: its default, its allowed range and what it means."""

    default: float
    low: float = -np.inf
    high: float = np.inf
    doc: str = ""


class Group(NamedTuple):
    """Geometry of one pool (the layers of a group share it). Plain integers.

    ``layers``: layers of the group; ``experts``: experts per layer; ``keys``: layers x experts;
    ``slots``: capacity in slots (``bmoe``: bytes over the mean expert size); ``k``: picks per token
    and layer; ``lookups``: cached-path lookups of the whole run, the horizon of ``next_use``;
    ``seed``: for policies that draw random numbers.
    """

    layers: int
    experts: int
    keys: int
    slots: int
    k: int
    lookups: int
    seed: int


class Geometry(Group):
    """What ``init`` is given: the group, and of what the policy needs the part known beforehand.

    ``uses``: int64 [keys]; ``layer_bytes``: int64 [layers]; as NEEDS says, else length 0.
    """

    uses: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    layer_bytes: npt.NDArray[np.int64] = np.zeros(0, np.int64)


class Cache(NamedTuple):
    """What is resident, kept by the kernel; policies read it and never write it.

    ``slot_of``: int32 [keys], slot of a key or -1. ``key_of``: int32 [capacity], key in a slot or
    -1. ``stamp``: uint32 [keys] and ``now``: uint32 [1]; a key belongs to the present access set
    when its stamp equals now, which starts again from 0 after 4 billion sets. ``free``: int32
    [capacity], stack of empty slots, ``n_free``: int64 [1] its height. ``next_use``: int64 [keys],
    position of the key's next lookup, or lookups + key if it is never used again (only for policies
    that need "next_use"; else length 0). ``weight``: float32 [keys], router weights of the present
    members, summed over the tokens of the step; of other keys what they had last (only for policies
    that need "weights"; else length 0).
    """

    slot_of: npt.NDArray[np.int32]
    key_of: npt.NDArray[np.int32]
    stamp: npt.NDArray[np.uint32]
    now: npt.NDArray[np.uint32]
    free: npt.NDArray[np.int32]
    n_free: npt.NDArray[np.int64]
    next_use: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float32]


def new_cache(
    group: Group, capacity: int, *, next_use: bool = False, weights: bool = False
) -> Cache:
    """An empty cache of ``capacity`` slots that fill in index order."""
    return Cache(
        slot_of=np.full(group.keys, -1, np.int32),
        key_of=np.full(capacity, -1, np.int32),
        stamp=np.zeros(group.keys, np.uint32),
        now=np.zeros(1, np.uint32),
        free=np.arange(capacity - 1, -1, -1, dtype=np.int32),
        n_free=np.array([capacity], np.int64),
        next_use=np.zeros(group.keys if next_use else 0, np.int64),
        weight=np.zeros(group.keys if weights else 0, np.float32),
    )
