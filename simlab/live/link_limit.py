"""What the link to a GPU can carry at most, so that a figure above it is known for a mistake."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

#: GB/s of one PCIe lane, one direction, after line coding (8b/10b, 128b/130b, FLIT), by GT/s.
_LANE = {2.5: 0.25, 5.0: 0.5, 8.0: 0.985, 16.0: 1.969, 32.0: 3.938, 64.0: 7.563}
_GENERATION = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
#: Chips whose GPU is tied to the CPU by NVLink-C2C: 450 GB/s a direction.
_C2C = ("GH200", "GB200", "GB300", "GB10")
_C2C_GB_S = 450.0


def link_limit(device: Any) -> tuple[float | None, str]:
    """GB/s that the link of a device can carry, or None, and where that is known from."""
    if device.kind == "cpu":
        return None, "host memory has no link whose limit is known"
    if any(chip in device.name for chip in _C2C):
        return _C2C_GB_S, "NVLink-C2C"
    found = _of_driver(device) or _of_kernel(device)
    if found is None:
        return None, "unknown: neither nvidia-smi nor /sys tells the link; give it with --limit"
    rate, width, source = found
    if rate not in _LANE:
        return None, f"unknown: a PCIe rate of {rate:g} GT/s"
    return _LANE[rate] * width, f"PCIe {rate:g} GT/s x{width} ({source})"


def _of_driver(device: Any) -> tuple[float, int, str] | None:
    """(GT/s a lane, lanes, source) from nvidia-smi: the most that GPU and slot agree on."""
    query = ["nvidia-smi", "--query-gpu=uuid,pcie.link.gen.max,pcie.link.width.max"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    uuid = str(getattr(device.torch.cuda.get_device_properties(device.place), "uuid", "?"))
    rows = [row for row in rows if len(row) == 3 and (uuid in row[0] or len(rows) == 1)]
    if len(rows) != 1 or not (rows[0][1].isdecimal() and rows[0][2].isdecimal()):
        return None
    generation, width = int(rows[0][1]), int(rows[0][2])
    rate = _GENERATION.get(generation)
    return None if rate is None or width < 1 else (rate, width, "nvidia-smi")


def _of_kernel(device: Any) -> tuple[float, int, str] | None:
    """The same from /sys, which knows AMD's GPUs too."""
    properties = device.torch.cuda.get_device_properties(device.place)
    try:
        address = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
            f":{properties.pci_device_id:02x}.0"
        )
        folder = Path("/sys/bus/pci/devices") / address
        speed = (folder / "max_link_speed").read_text(encoding="ascii")
        width = int((folder / "max_link_width").read_text(encoding="ascii"))
    except (AttributeError, OSError, ValueError, TypeError):
        return None
    number = re.match(r"\s*([0-9.]+)", speed)
    return (float(number.group(1)), width, "/sys") if number and 0 < width <= 32 else None
