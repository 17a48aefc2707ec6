"""The link over which experts are uploaded: a measured profile, and the two numbers made of it.

A profile is a JSON file that ``simlab probe`` writes. Copies queued one behind the other take
``latency + size / bandwidth`` each; the two are fitted to the measured copies.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from simlab.errors import SimlabError, UsageError
from simlab.whole_file import write_atomically

WHAT = "link profile"
VERSION = 1


@dataclass(frozen=True)
class LinkProfile:
    """What was measured of one link.

    Attributes:
        device: "cpu" or "cuda". name: the hardware. note: printed beside every figure ("host memory
            copy, not PCIe" on ``cpu``).
        peak_gb_s: highest rate seen of pinned copies, 10^9 bytes a second.
        bandwidth_gb_s, latency_us: fitted to copies queued one behind the other.
        ids_wait_us: router ids to the host and the host waiting for them, once (median).
        limit_gb_s: what the link can do at most, None when unknown. limit_source: who says so.
        valid: no figure is above the limit, and all bytes arrived. problems: what is wrong else.
        points: one a measured case: direction, memory, size, copies, compute, gb_s, us (medians a
            copy), low_gb_s, high_gb_s, rounds.
        provenance: command, versions, host, time.
    """

    device: str
    name: str
    note: str
    peak_gb_s: float
    bandwidth_gb_s: float
    latency_us: float
    ids_wait_us: float
    limit_gb_s: float | None
    limit_source: str
    valid: bool
    problems: tuple[str, ...]
    points: list[dict[str, Any]] = field(default_factory=list)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As written to a file."""
        return {"what": WHAT, "version": VERSION, **asdict(self)}


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Bandwidth in GB/s and latency in µs, from seconds per queued copy of each size in bytes.

    Least squares of the relative error, so that small copies count as much as large ones. A latency
    below zero would be noise: it is then 0 and the bandwidth is fitted alone.

    Raises:
        SimlabError: the times do not grow with the sizes.
    """
    size, time = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    columns = np.stack([1 / time, size / time], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(size)), rcond=None)
    if latency < 0:
        latency = 0.0
        per_byte = float((size / time).sum() / ((size / time) ** 2).sum())
    if not per_byte > 0:
        raise SimlabError("larger copies took no longer than small ones: no bandwidth to be fitted")
    return 1e-9 / float(per_byte), 1e6 * float(latency)


def write_profile(profile: LinkProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON, all of it or nothing."""
    body = json.dumps(profile.to_dict(), indent=1, allow_nan=False) + "\n"
    write_atomically(path, body.encode())


def read_profile(path: str | os.PathLike[str]) -> LinkProfile:
    """Read a profile.

    Raises:
        UsageError: there is no such file. SimlabError: it is damaged, of a newer version, or says
            of itself that its run was invalid.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no link profile {path}; write one with simlab probe --out {path.name}")
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.pop("what", None) != WHAT:
            raise SimlabError("it is not a link profile")
        if int(found.pop("version")) > VERSION:
            raise SimlabError("it is of a newer version; update simlab")
        profile = LinkProfile(**{**found, "problems": tuple(found["problems"])})
        numbers = (profile.peak_gb_s, profile.bandwidth_gb_s, profile.latency_us)
        if not all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers):
            raise SimlabError("its rates are not numbers")
        if not profile.bandwidth_gb_s > 0 or not profile.peak_gb_s > 0:
            raise SimlabError("its bandwidth is 0")
    except (SimlabError, OSError, ValueError, TypeError, KeyError) as exc:
        reason = " ".join(str(exc).split())[:200]
        raise SimlabError(f"cannot use {path}: {reason}; run simlab probe again") from None
    if not profile.valid:
        raise SimlabError(
            f"{path} says of itself that its run was invalid ({'; '.join(profile.problems)});"
            " run simlab probe again"
        )
    return profile
