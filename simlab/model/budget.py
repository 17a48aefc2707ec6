"""How many slots a budget buys: llama.cpp's rule for --moe-cache-mib.

The budget is shared among the devices by the tensor split, and on a device among its groups in
proportion to their host bytes (layers x experts x bytes of an expert, unpadded). A group gets the
largest n <= its keys for which every tensor's bank of n + 1 experts (one spare slot), padded to 128
bytes, fits its share. n below n_expert_used: the group is not cached. Sources: DESIGN.md, Slot
budget; llama.cpp's src/llama-moe-cache.cpp, whose shares are computed in 64-bit floats, from left
to right, as here; checked against article 002's startup log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simlab.errors import SimlabError, UsageError
from simlab.model.layout import ExpertLayout, spans

PAD = 128
MIB = 2**20
#: Budgets are searched up to this many MiB (2^60 bytes).
MOST_MIB = 2**40


class NothingCached(SimlabError):
    """The budget holds no group: llama.cpp refuses to start."""


def padded(size: int) -> int:
    """``size`` rounded up to the allocation's alignment."""
    return -(-size // PAD) * PAD


def bank_bytes(tensor_bytes: Sequence[int], slots: int) -> int:
    """Bytes allocated for a pool of so many slots; nothing is allocated for none."""
    return sum(padded(size * (slots + 1)) for size in tensor_bytes) if slots else 0


def slots_in(budget: int, tensor_bytes: Sequence[int], most: int) -> int:
    """Largest n <= ``most`` whose banks of n + 1 experts fit ``budget`` bytes (0 if none does)."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if bank_bytes(tensor_bytes, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def host_bytes(layout: ExpertLayout) -> list[int]:
    """Bytes of each group's experts in host memory.

    Raises:
        UsageError: the bytes of an expert are unknown.
    """
    if not all(group.tensor_bytes for group in layout.groups):
        raise UsageError(
            "a budget in MiB needs the bytes of an expert, which this trace does not know:"
            " import it with --expert-bytes, name the model with --layout, or give --slots"
        )
    return [layout.keys_of(i) * sum(group.tensor_bytes) for i, group in enumerate(layout.groups)]


def group_budgets(
    layout: ExpertLayout, mib: float, split: Sequence[float] | None = None
) -> list[int]:
    """Bytes that each group may use.

    Args:
        mib: the value of --moe-cache-mib. split: share of each device, default all alike.

    Raises:
        UsageError: expert bytes are unknown, or a device of the layout has no share.
    """
    host = host_bytes(layout)
    on_device: dict[int, int] = {}
    for group, size in zip(layout.groups, host, strict=True):
        on_device[group.device] = on_device.get(group.device, 0) + size
    if split is not None and len(split) <= max(on_device):
        raise UsageError(f"the tensor split names {len(split)} devices, the layout has more")
    parts = {device: 1.0 if split is None else float(split[device]) for device in on_device}
    total = 0.0
    for device in sorted(parts):  # as llama.cpp sums them
        total += parts[device]
    if total == 0.0:
        parts, total = dict.fromkeys(parts, 1.0), float(len(parts))
    whole = float(int(mib * MIB))
    return [
        int(whole * parts[group.device] / total * own / on_device[group.device])
        for group, own in zip(layout.groups, host, strict=True)
    ]


def slots_for_budget(
    layout: ExpertLayout, mib: float, split: Sequence[float] | None = None
) -> tuple[list[int], list[str]]:
    """Slots of each group, and warnings.

    Args:
        mib: the value of --moe-cache-mib. split: share of each device, default all alike.

    Raises:
        UsageError: the expert bytes are unknown. NothingCached: no group can be cached.
    """
    slots: list[int] = []
    warnings: list[str] = []
    for i, budget in enumerate(group_budgets(layout, mib, split)):
        group = layout.groups[i]
        n = slots_in(budget, group.tensor_bytes, layout.keys_of(i))
        if n < layout.k:
            warnings.append(
                f"budget too small for the group of layers {spans(group.layers)}:"
                f" {n} slots, a token needs {layout.k}; it is not cached"
            )
            n = 0
        slots.append(n)
    if not any(slots):
        floor = smallest_mib(layout, split, any)
        raise NothingCached(
            f"{mib:g} MiB caches no group: each needs at least {layout.k} slots; llama.cpp refuses"
            f" to start below {floor:,} MiB"
        )
    return slots, warnings


def smallest_mib(
    layout: ExpertLayout,
    split: Sequence[float] | None,
    enough: Callable[[list[bool]], bool],
    wanted: int = 0,
) -> int:
    """The smallest whole --moe-cache-mib.

    Args:
        enough: ``any``: one group has the slots (llama.cpp starts); ``all``: every group.
        wanted: slots that a group is to have, default k.

    Raises:
        UsageError: there is no such budget.
    """

    def has(mib: int) -> bool:
        return enough(
            [
                slots_in(budget, layout.groups[i].tensor_bytes, layout.keys_of(i))
                >= min(wanted or layout.k, layout.keys_of(i))
                for i, budget in enumerate(group_budgets(layout, mib, split))
            ]
        )

    low, high = 1, MOST_MIB
    if not has(high):
        raise UsageError("no budget gives every group its slots: a device's share is 0")
    while low < high:
        middle = (low + high) // 2
        if has(middle):
            high = middle
        else:
            low = middle + 1
    return low
