"""What a budget buys: slots, shares, the floor, and what to expect of so few slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from simlab.errors import UsageError
from simlab.model.budget import (
    bank_bytes,
    group_budgets,
    host_bytes,
    slots_for_budget,
    smallest_mib,
)
from simlab.model.layout import ExpertGroup, ExpertLayout, spans


@dataclass(frozen=True)
class Cycle:
    """Distinct keys that one decode step touches in a group: the cycle T.

    At one stream T is ``low`` = layers x k exactly. With more it is a distribution that only a
    trace tells: it lies between ``low`` and ``high``; ``uniform`` is its mean if every stream
    picked independently and evenly.
    """

    low: int
    uniform: int
    high: int


@dataclass(frozen=True)
class GroupPlan:
    """One group of a plan.

    Attributes:
        keys: its (layer, expert) pairs. budget: bytes it may use. slots: of its pool, 0 if it is
            not cached. share: slots / keys. bank: bytes allocated. cliff: slots up to which LRU has
            no hit at one stream.
    """

    group: ExpertGroup
    keys: int
    host: int
    budget: int
    slots: int
    share: float
    bank: int
    cycle: Cycle
    cliff: int


@dataclass(frozen=True)
class Plan:
    """Slots for a budget.

    Attributes:
        mib: the --moe-cache-mib to type. floor: the smallest with which llama.cpp starts;
            floor_all: the smallest that caches every group. concurrency: C, streams together.
    """

    mib: float
    floor: int
    floor_all: int
    concurrency: int
    groups: tuple[GroupPlan, ...]
    warnings: tuple[str, ...]

    @property
    def share(self) -> float:
        """Slots over keys, of all groups."""
        return sum(g.slots for g in self.groups) / sum(g.keys for g in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "share": self.share}


def cycle(layers: int, n_expert: int, k: int, concurrency: int) -> Cycle:
    """The cycle T of a group at a concurrency."""
    uniform = layers * n_expert * (1 - (1 - k / n_expert) ** concurrency)
    return Cycle(layers * k, round(uniform), layers * min(concurrency * k, n_expert))


def plan(
    layout: ExpertLayout,
    *,
    mib: float | None = None,
    slots: int | None = None,
    split: Sequence[float] | None = None,
    concurrency: int = 1,
) -> Plan:
    """Plan a cache.

    Args:
        mib: the value of --moe-cache-mib; or
        slots: wanted in every group, for which the smallest budget is found.
        split: share of each device. concurrency: streams decoded together.

    Raises:
        UsageError: an argument is out of range. NothingCached: the budget holds no group.
    """
    if concurrency < 1:
        raise UsageError("--concurrency must be 1 or more")
    if slots is not None:
        if slots < layout.k:
            raise UsageError(f"--slots must be at least the {layout.k} experts of a token")
        mib = smallest_mib(layout, split, all, wanted=slots)
    if mib is None or not 0 < mib < 2**40:
        raise UsageError("--moe-cache-mib must be above 0 and below 2^40")
    found, warnings = slots_for_budget(layout, mib, split)
    budgets, host = group_budgets(layout, mib, split), host_bytes(layout)
    groups = []
    for i, group in enumerate(layout.groups):
        n, keys, layers = found[i], layout.keys_of(i), len(group.layers)
        each = GroupPlan(
            group=group,
            keys=keys,
            host=host[i],
            budget=budgets[i],
            slots=n,
            share=n / keys,
            bank=bank_bytes(group.tensor_bytes, n),
            cycle=cycle(layers, layout.n_expert, layout.k, concurrency),
            cliff=(layers - 1) * layout.k,
        )
        groups.append(each)
        if n:
            warnings += _warn(each, layout, concurrency)
    return Plan(
        mib=mib,
        floor=smallest_mib(layout, split, any),
        floor_all=smallest_mib(layout, split, all),
        concurrency=concurrency,
        groups=tuple(groups),
        warnings=tuple(warnings),
    )


def _warn(each: GroupPlan, layout: ExpertLayout, concurrency: int) -> list[str]:
    """What so few slots lead to; the worst alone is said."""
    where = f"layers {spans(each.group.layers)}: {each.slots:,} slots"
    needed = min(concurrency * layout.k, layout.n_expert)
    if needed > each.slots:
        return [
            f"{where} are fewer than the {needed} that a step of {concurrency} streams may pick in"
            " a layer: decode never uses the cache"
        ]
    if each.slots <= each.cliff:
        return [
            f"{where} are near the floor: up to {each.cliff:,} LRU evicts each expert before its"
            " layer comes again and hits nothing, which is worse than no cache"
        ]
    told = each.cycle
    if concurrency == 1:
        if each.slots < told.low:
            return [f"{where} are below the cycle T = {told.low:,}: few hits"]
    elif each.slots < told.low:
        return [f"{where} are below the least cycle T = {told.low:,} of {concurrency} streams"]
    elif each.slots < told.uniform:
        return [
            f"{where} may be below the cycle T of {concurrency} streams, which is between"
            f" {told.low:,} and {told.high:,} ({told.uniform:,} if they picked evenly and"
            " independently): below it LRU hits almost nothing; replay a trace"
        ]
    return []
