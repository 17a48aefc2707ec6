"""How many slots a budget buys: llama.cpp's rule for --moe-cache-mib.

The budget is shared among a device's groups in proportion to their host bytes (layers x experts x
bytes of an expert, unpadded). A group gets the largest n <= its keys for which every tensor's bank
of n + 1 experts (one spare slot), padded to 128 bytes, fits its share. n below n_expert_used: the
group is not cached. Source: DESIGN.md, Slot budget; checked against article 002's startup log.
"""

from __future__ import annotations

from collections.abc import Sequence

from simlab.errors import UsageError
from simlab.model.layout import ExpertLayout

PAD = 128
MIB = 2**20


def padded(size: int) -> int:
    """``size`` rounded up to the allocation's alignment."""
    return -(-size // PAD) * PAD


def slots_in(budget: int, tensor_bytes: Sequence[int], most: int) -> int:
    """Largest n <= ``most`` whose banks of n + 1 experts fit ``budget`` bytes (0 if none does)."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if sum(padded(size * (middle + 1)) for size in tensor_bytes) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def slots_for_budget(layout: ExpertLayout, mib: float) -> tuple[list[int], list[str]]:
    """Slots of each group on a single device, and warnings.

    Args:
        mib: the value of --moe-cache-mib.

    Raises:
        UsageError: the expert bytes are unknown, or no group can be cached (llama.cpp refuses to
            start then).
    """
    if not all(group.tensor_bytes for group in layout.groups):
        raise UsageError(
            "a budget in MiB needs the bytes of an expert, which this trace does not know:"
            " import it with --expert-bytes, or give --slots"
        )
    budget = int(mib * MIB)
    host = [layout.keys_of(i) * sum(group.tensor_bytes) for i, group in enumerate(layout.groups)]
    slots: list[int] = []
    warnings: list[str] = []
    for i, group in enumerate(layout.groups):
        share = budget * host[i] // sum(host)
        n = slots_in(share, group.tensor_bytes, layout.keys_of(i))
        if n < layout.k:
            warnings.append(
                f"budget too small for the group of layers {group.layers[0]}..{group.layers[-1]}:"
                f" {n} slots, a token needs {layout.k}; it is not cached"
            )
            n = 0
        slots.append(n)
    if not any(slots):
        raise UsageError(
            f"{mib:g} MiB caches no group: each needs at least {layout.k} slots;"
            " llama.cpp would refuse to start"
        )
    return slots, warnings
