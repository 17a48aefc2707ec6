"""The experts in host memory: pinned, and of a content that tells which expert a byte belongs to.

The content of a tensor of an expert is a ramp of 64-bit words that starts at a hash of (layer,
expert, tensor), so wherever bytes arrive, they can be compared with what they must be, whole and
on the device itself.

``fraction`` folds the bank when host memory is short: the layers of a group then share, in turn,
the experts of the first ``ceil(fraction x layers)`` of them. Copies are as many and as large as
with a whole bank.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from simlab.errors import UsageError
from simlab.live.device import Device
from simlab.model.layout import ExpertLayout

_STEP = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def first_word(layer: int, expert: int, tensor: int) -> int:
    """The first 64-bit word of a tensor of an expert (splitmix64 of the three numbers)."""
    z = ((layer << 40) + (expert << 16) + tensor + 1) * _STEP & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


class Bank:
    """The experts of a layout.

    Args:
        layout: with known bytes. device: pins the memory. fraction: of the layers that have bytes
            of their own, above 0 up to 1.

    Attributes:
        tensors: per group, per stored layer, per tensor: uint8 [n_expert, bytes of the tensor].
        folded: some layers share bytes. n_bytes: host memory taken.

    Raises:
        UsageError: the bytes are unknown, or the fraction is not allowed.
        SimlabError: host memory is short, or cannot be pinned.
    """

    def __init__(self, layout: ExpertLayout, device: Device, *, fraction: float = 1.0) -> None:
        if not 0 < fraction <= 1:
            raise UsageError(f"--bank-fraction must be above 0 and at most 1, not {fraction:g}")
        if not all(group.tensor_bytes for group in layout.groups):
            raise UsageError(
                "the trace does not know its expert bytes: import it with --expert-bytes"
            )
        self.layout = layout
        self.stored = [math.ceil(fraction * len(group.layers)) for group in layout.groups]
        self.folded = any(
            n < len(group.layers) for n, group in zip(self.stored, layout.groups, strict=True)
        )
        self.n_bytes = sum(
            n * layout.n_expert * (group.expert_bytes or 0)
            for n, group in zip(self.stored, layout.groups, strict=True)
        )
        self.tensors: list[list[list[Any]]] = []
        uint8 = device.torch.uint8
        for group, stored in zip(layout.groups, self.stored, strict=True):
            layers = []
            for layer in group.layers[:stored]:
                tensors = []
                for t, size in enumerate(group.tensor_bytes):
                    what = f"the expert bank ({self.n_bytes / 2**20:,.0f} MiB in all)"
                    tensor = device.pinned((layout.n_expert, size), uint8, what)
                    fill(tensor.numpy(), layer, t)
                    tensors.append(tensor)
                layers.append(tensors)
            self.tensors.append(layers)

    def of(self, group: int, layer: int) -> list[Any]:
        """Tensors of a layer (its index in the group): uint8 [n_expert, bytes] each."""
        return self.tensors[group][layer % self.stored[group]]

    def owner(self, group: int, layer: int) -> int:
        """The model's number of the layer whose bytes layer ``layer`` of the group holds."""
        return self.layout.groups[group].layers[layer % self.stored[group]]

    def note(self) -> str:
        """What a reader of the figures must know; empty for a whole bank."""
        if not self.folded:
            return ""
        return "folded expert bank: " + ", ".join(
            f"{n} of {len(group.layers)} layers of group {i + 1} have bytes of their own"
            for i, (n, group) in enumerate(zip(self.stored, self.layout.groups, strict=True))
        )


def fill(rows: np.ndarray[Any, Any], layer: int, tensor: int) -> None:
    """Write the content of tensor ``tensor`` of every expert of a layer.

    Args:
        rows: uint8 [n_expert, bytes], contiguous rows, written.
    """
    n = rows.shape[1]
    words = np.arange(-(-n // 8), dtype=np.uint64) * np.uint64(_STEP)
    line = np.empty_like(words)
    for expert in range(rows.shape[0]):
        np.add(words, np.uint64(first_word(layer, expert, tensor)), out=line)
        rows[expert] = line.view(np.uint8)[:n]


def content(device: Device, n: int, layer: int, expert: int, tensor: int) -> Any:
    """What tensor ``tensor`` of an expert must be, made on the device: uint8 [n]."""
    torch = device.torch
    words = torch.arange(-(-n // 8), dtype=torch.int64, device=device.place)
    # torch has no unsigned 64-bit arithmetic; signed wraps to the same bits
    words *= _signed(_STEP)
    words += _signed(first_word(layer, expert, tensor))
    return words.view(torch.uint8)[:n]


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def wrong_slots(device: Device, bank: Bank, group: int, pool: Any, resident: Any) -> list[int]:
    """Slots whose content is not that of the key they are said to hold; every byte is compared.

    Args:
        pool: per tensor uint8 [slots, bytes] on the device.
        resident: int32 [slots], key in each slot (layer in group * n_expert + expert), -1 if empty.
    """
    wrong = []
    sizes = bank.layout.groups[group].tensor_bytes
    for slot, key in enumerate(resident.tolist()):
        if key < 0:
            continue
        layer, expert = divmod(key, bank.layout.n_expert)
        owner = bank.owner(group, layer)
        for t, size in enumerate(sizes):
            expected = content(device, size, owner, expert, t)
            if not device.torch.equal(pool[t][slot], expected):
                wrong.append(slot)
                break
    return wrong
