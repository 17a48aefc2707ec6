"""What policies are judged by, as figures of sums over requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.analysis.bootstrap import Figure
from simlab.cost.model import Costs
from simlab.errors import UsageError
from simlab.model.budget import MIB
from simlab.replay.by_request import RequestTable

METRICS = ("hit_rate", "bytes_moved", "ms")
#: The counters of a RequestTable.
COUNTERS = (*(f.name for f in fields(RequestTable) if f.name != "ids"), "misses")


@dataclass(frozen=True)
class Metric:
    """A figure to judge by.

    Attributes:
        name: one of METRICS. unit: printed with it. figure: of the sums of a RequestTable's
            columns. higher: the higher the better.
    """

    name: str
    unit: str
    figure: Figure
    higher: bool

    def worse_by(self, ours: float, theirs: float) -> float:
        """How much worse ``ours`` is; negative when it is better."""
        return theirs - ours if self.higher else ours - theirs


def hit_rate(sums: Mapping[str, Any]) -> Any:
    """Hits per lookup on the cached path."""
    return np.divide(sums["hits"], sums["lookups"])


def mib_per_token(sums: Mapping[str, Any]) -> Any:
    """MiB over the link per decode token."""
    return np.divide(sums["moved"], MIB * sums["tokens"])


def metric_of(name: str, costs: Costs | None = None, cpu_gb_s: float = 0.0) -> Metric:
    """The metric of a name.

    Args:
        costs: for ``ms``. cpu_gb_s: for ``ms``, the rate at which the CPU computes experts.

    Raises:
        UsageError: there is no such metric.
    """
    if name == "hit_rate":
        return Metric(name, "", hit_rate, True)
    if name == "bytes_moved":
        return Metric(name, "MiB/token", mib_per_token, False)
    if name != "ms" or costs is None:
        raise UsageError(f"--metric must be one of {', '.join(METRICS)}, not {name!r}")

    def ms(sums: Mapping[str, Any]) -> Any:
        uploads = sums["moved"] / costs.bandwidth_gb_s / 1e6
        uploads = uploads + sums["copies"] * costs.latency_us / 1e3
        total = sums["steps"] * costs.step_ms + sums["served"] * costs.lookup_ms
        total = total + (1 - costs.overlap) * uploads + sums["cpu_bytes"] / cpu_gb_s / 1e6
        return np.divide(total, sums["tokens"])

    return Metric(name, "ms/token", ms, False)


def columns_of(table: RequestTable) -> dict[str, npt.NDArray[np.float64]]:
    """A table's counters by name, its misses among them."""
    return {name: getattr(table, name) for name in COUNTERS}


def of_policies(tables: Mapping[str, RequestTable]) -> dict[str, npt.NDArray[np.float64]]:
    """Counters of several policies over the same requests, as ``label/counter``."""
    return {
        f"{t}/{name}": c for t, table in tables.items() for name, c in columns_of(table).items()
    }


def figure_of(label: str, figure: Figure) -> Figure:
    """The figure of one of the policies of ``of_policies``."""
    return lambda sums: figure({name: sums[f"{label}/{name}"] for name in COUNTERS})


def total(table: RequestTable, figure: Figure) -> float | None:
    """The figure of a whole cell; None where it is not defined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure({name: c.sum() for name, c in columns_of(table).items()}))
    return value if np.isfinite(value) else None
