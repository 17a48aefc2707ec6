"""What ``simlab tune`` is asked: the metric, the hit rate to keep, values to try."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from simlab.errors import UsageError

if TYPE_CHECKING:
    from simlab.analysis.metrics import Metric
    from simlab.policy.loader import Policy


def tried_values(texts: Sequence[str]) -> dict[str, list[float]]:
    """Values to try, each NAME=V,V,...

    Raises:
        UsageError: something else, or a parameter named twice.
    """
    from simlab.cli.options import numbers

    found: dict[str, list[float]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--try takes NAME=V,V,..., not {text!r}")
        if name in found:
            raise UsageError(f"--try {name} is given twice: separate its values by commas")
        found[name] = numbers(values, float, f"--try {name}")
    return found


def chosen_metric(name: str, on_decline: str, *, link: str, cpu: str, step_ms: float) -> Metric:
    """The metric asked for; ``ms`` with what a link and a CPU are told or assumed to do.

    Raises:
        UsageError: it is none, or a rate is not understood.
    """
    from simlab.analysis.metrics import metric_of
    from simlab.cost.link import read_profile
    from simlab.cost.model import Costs, costs_of
    from simlab.cost.presets import COPY_US, host_rate, link_rate

    if name != "ms":
        return metric_of(name)
    if not 0 <= step_ms < 1e6:
        raise UsageError(f"--step-ms must be 0 or more, not {step_ms:g}")
    if os.path.isfile(link):
        known = costs_of(read_profile(link))
    else:
        rate = link_rate(link)
        known = Costs(rate.gb_s, COPY_US, source=rate.source)
    costs = Costs(known.bandwidth_gb_s, known.latency_us, step_ms=step_ms, source=known.source)
    return metric_of(name, costs, host_rate(cpu).gb_s)


def chosen_floor(text: str | None, policy: Policy, metric: str) -> float | str | None:
    """The hit rate to keep: a number, "lru", or None.

    A policy that declines moves fewest bytes when it declines everything, so where bytes or time
    are made best, LRU's hit rate is kept unless something else is asked for.

    Raises:
        UsageError: it is no rate.
    """
    if text is None:
        return "lru" if policy.declines and metric != "hit_rate" else None
    if text in ("lru", "none"):
        return "lru" if text == "lru" else None
    try:
        rate = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise UsageError(
            f"--at-least-hit-rate takes lru, none or a rate such as 0.5 or 50%, not {text!r}"
        )
    return rate
