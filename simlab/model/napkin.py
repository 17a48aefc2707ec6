"""The napkin arithmetic of article 000: bytes a token touches, over a link.

Nothing is simulated here: every picked expert that is not a hit crosses the link at the link's
specified speed, and nothing else takes time. Real copies reach about 70-85 % of that speed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from simlab.errors import UsageError
from simlab.model.shape import ModelShape

#: GB/s of one PCIe lane by generation: 8, 16 and 32 GT/s with 128 of 130 bits for data, rounded as
#: in article 000 (31.5 and 63.0 GB/s at 16 lanes).
_LANE_GB_S = {3: 15.75 / 16, 4: 31.5 / 16, 5: 63.0 / 16}


@dataclass(frozen=True)
class Crossing:
    """Time of a token on one link. ``tok_s``: the ceiling that it sets, before any compute."""

    link: str
    gb_s: float
    hit_rate: float
    mib: float
    ms: float
    tok_s: float | None


@dataclass(frozen=True)
class Napkin:
    """The figures; ``touched``: experts that a token picks over all layers."""

    expert_bytes: int
    n_experts: int
    total_bytes: int
    touched: int
    token_bytes: int
    crossings: tuple[Crossing, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def parse_link(text: str) -> tuple[str, float]:
    """Name and GB/s of ``pcie4x16`` (generations 3-5, 1 to 16 lanes) or of a number of GB/s.

    Raises:
        UsageError: it is neither.
    """
    found = re.fullmatch(r"pcie\s?([345])(?:\.0)?\s?x(1|2|4|8|16)", text.strip().lower())
    if found:
        return f"PCIe {found[1]}.0 x{found[2]}", _LANE_GB_S[int(found[1])] * int(found[2])
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < 1e6:
        raise UsageError(f"--link takes pcie4x16 or a speed in GB/s, not {text!r}")
    return f"{speed:g} GB/s", speed


def napkin(shape: ModelShape, links: Sequence[str], hit_rates: Sequence[float]) -> Napkin:
    """Compute the figures.

    Args:
        links: see parse_link. hit_rates: shares 0..1; each is computed for each link.

    Raises:
        UsageError: a link or a rate is not understood.
    """
    if any(not 0 <= rate <= 1 for rate in hit_rates):
        raise UsageError("--hit-rate takes percentages from 0 to 100, such as 77,89")
    touched = shape.k * len(shape.experts)
    token = shape.k * sum(shape.layer_bytes(layer) for layer in shape.experts) // shape.n_expert
    crossings = []
    for rate in hit_rates:
        for name, gb_s in map(parse_link, links):
            missed = token * (1 - rate)
            ms = missed / (gb_s * 1e9) * 1e3
            crossings.append(
                Crossing(name, gb_s, rate, missed / 2**20, ms, 1000 / ms if ms else None)
            )
    n = shape.n_expert * len(shape.experts)
    return Napkin(
        expert_bytes=shape.expert_bytes // n,
        n_experts=n,
        total_bytes=shape.expert_bytes,
        touched=touched,
        token_bytes=token,
        crossings=tuple(crossings),
    )
