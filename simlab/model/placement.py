"""Where a model's experts live: in host memory or on which device, and what memory that leaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from simlab.errors import UsageError
from simlab.model.budget import MIB
from simlab.model.catalogue import parse_spans
from simlab.model.devices import check_split, devices_of_layers
from simlab.model.layout import ExpertLayout
from simlab.model.shape import ModelShape, layout_for
from simlab.model.source import read_model

#: What is left free of a device's memory when a budget is derived from it (--reserve): KV cache
#: and compute buffers. A rule of thumb, printed with the plan.
DEFAULT_RESERVE = "2GiB"
_UNITS = {"": 1, "b": 1, "mib": MIB, "gib": 2**30, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Placement:
    """A model laid out on devices: ``split`` has a number for each device."""

    shape: ModelShape
    layout: ExpertLayout
    split: tuple[float, ...]

    @property
    def device_bytes(self) -> int | None:
        """Bytes of the weights on the devices, pools not counted; None when unknown."""
        if self.shape.other_bytes is None:
            return None
        resident = sum(self.shape.layer_bytes(layer) for layer in self.layout.resident)
        return self.shape.other_bytes - self.shape.input_bytes + resident


def place(
    model: str,
    *,
    dtype: str | None = None,
    host_layers: str | None = None,
    n_cpu_moe: int | None = None,
    tensor_split: str | None = None,
    vram: Sequence[int] = (),
) -> Placement:
    """Read a model and place its layers.

    Args:
        model, dtype: see ``simlab.model.source.read_model``.
        host_layers: layers with their experts in host memory, ``0-19,40``; default all.
        n_cpu_moe: the same as a number of first layers, as llama.cpp's --n-cpu-moe.
        tensor_split: share of each device, ``3,1``. vram: bytes of each, the split by default.

    Raises:
        UsageError: an argument is not understood, or does not fit the model.
    """
    shape = read_model(model, dtype=dtype)
    hosted: list[int] | None = None
    if host_layers is not None and n_cpu_moe is not None:
        raise UsageError("give --host-layers or --n-cpu-moe, not both")
    if host_layers is not None:
        hosted = parse_spans(host_layers)
    if n_cpu_moe is not None:
        hosted = [layer for layer in shape.experts if layer < n_cpu_moe]
    if tensor_split is not None:
        split = tuple(_numbers(tensor_split))
        check_split(split)
        if vram and len(vram) != len(split):
            raise UsageError(
                f"--tensor-split names {len(split)} devices: give --vram a size for each"
            )
    else:
        split = tuple(float(size) for size in vram) or (1.0,)
    devices = devices_of_layers(shape.n_layers, split)
    return Placement(shape, layout_for(shape, host_layers=hosted, devices=devices), split)


def budget_from_memory(placement: Placement, vram: Sequence[int], reserve: int) -> float:
    """MiB left for the pools on all devices together.

    Args:
        vram: bytes of each device. reserve: bytes to leave free on each.

    Raises:
        UsageError: nothing is left, or it is not known what else is on the devices.
    """
    used = placement.device_bytes
    if used is None:
        raise UsageError(
            "--vram needs a GGUF file, which tells the bytes of all other weights; give"
            " --moe-cache-mib for a config or a name"
        )
    left = sum(vram) - reserve * len(vram) - used
    if left < MIB:
        raise UsageError(
            f"{used / MIB:,.0f} MiB of weights and a reserve of {reserve / MIB:,.0f} MiB a device"
            f" leave no room for a cache in {sum(vram) / MIB:,.0f} MiB"
        )
    return left // MIB


def parse_bytes(text: str, option: str) -> int:
    """Bytes from ``24GiB``, ``500 MiB`` or ``24`` (GiB where no unit is given).

    Raises:
        UsageError: it is something else, or nothing.
    """
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get((found[2] or "gib").lower()) if found else None
    if not found or unit is None or not float(found[1]) > 0:
        raise UsageError(f"{option} takes a size such as 24GiB or 24576MiB, not {text!r}")
    return int(float(found[1]) * unit)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        raise UsageError(f"--tensor-split takes numbers such as 3,1, not {text!r}") from None
