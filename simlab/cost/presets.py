"""What machines are assumed to do when nobody has measured them. Every figure has its source.

Presets are rules of thumb, and what is computed from them says so: `simlab probe` measures a link,
`simlab calibrate` fits the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from simlab.errors import UsageError
from simlab.model.napkin import parse_link

#: Real copies reach 70-85 % of a link's specified speed (article 000); 6.28 of 7.88 GB/s fit the
#: R9700 notes, and batched copies on an RTX 5090 reach 51 of 63 GB/s (golden/README.md).
LINK_EFFICIENCY = 0.8
#: One pinned copy of 864 KiB on an RTX 5090 takes 27.3 µs, of which 51 GB/s explain 17.3.
COPY_US = 10.0
#: GB/s of host memory: two DDR5 channels 96, the eight of an EPYC 7742 205 (article 000).
HOST_MEMORY = {"ddr4x2": 51.2, "ddr5x2": 96.0, "ddr4x8": 205.0}
#: Share of it at which a CPU computes experts: the R9700 notes' run without a cache spends 28 ms on
#: about 0.93 GB, 33 GB/s, on what two DDR5 channels could read at 96.
CPU_EFFICIENCY = 0.35
#: GB/s of device memory, from the makers' data sheets.
DEVICE_MEMORY = {
    "rtx3060": 360.0,
    "rtx3090": 936.0,
    "rtx4060ti": 288.0,
    "rtx4070": 504.0,
    "rtx4080": 717.0,
    "rtx4090": 1008.0,
    "rtx5070ti": 896.0,
    "rtx5080": 960.0,
    "rtx5090": 1792.0,
    "r9700": 640.0,
    "t4": 320.0,
}
#: Share of it that decoding reaches: kernels of one token are short. A guess until calibrated.
DEVICE_EFFICIENCY = 0.5


@dataclass(frozen=True)
class Rate:
    """An effective rate in GB/s, and where it comes from."""

    gb_s: float
    source: str


def link_rate(text: str) -> Rate:
    """Effective rate of ``pcie4x16``, or a measured number of GB/s.

    Raises:
        UsageError: it is neither.
    """
    name, spec = parse_link(text)
    if name.startswith("PCIe"):
        gb_s = spec * LINK_EFFICIENCY
        return Rate(gb_s, f"preset: {LINK_EFFICIENCY:.0%} of the {spec:g} GB/s of {name}")
    return Rate(spec, "as given")


def host_rate(text: str) -> Rate:
    """Rate at which the CPU computes experts: of ``ddr5x2`` and the like, or GB/s as measured."""
    return _rate(text, HOST_MEMORY, CPU_EFFICIENCY, "--cpu")


def device_rate(text: str) -> Rate:
    """Rate at which the device reads weights in decode: of ``rtx4090``, or GB/s as measured."""
    return _rate(text, DEVICE_MEMORY, DEVICE_EFFICIENCY, "--gpu")


def _rate(text: str, known: dict[str, float], efficiency: float, option: str) -> Rate:
    name = text.strip().lower().replace(" ", "").replace("-", "")
    if name in known:
        gb_s = known[name] * efficiency
        return Rate(gb_s, f"preset: {efficiency:.0%} of the {known[name]:g} GB/s of {name}")
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < 1e6:
        raise UsageError(f"{option} takes {', '.join(known)} or GB/s, not {text!r}")
    return Rate(speed, "as given")
