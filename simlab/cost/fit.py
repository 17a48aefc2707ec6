"""Fit the time model to measured points, or say how far they leave its parameters open.

A step takes ``base_ms + misses x miss_ms``: everything that does not depend on the cache, plus the
share of the step's expert lookups that miss, times what the link needs for all of them. Two
parameters, so three points with known misses are the least from which anything is predicted; with
fewer, the sets of parameters that agree with every point are searched for their edges (a linear
program), and nothing is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simlab.cost.points import Point, Setup
from simlab.errors import SimlabError, UsageError

PARAMETERS = ("base_ms", "miss_ms")
#: Published speeds are rounded and vary from run to run: a point holds within this share.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Interval:
    """A parameter: its value (None: only bounded) between ``low`` and ``high`` (inf: open)."""

    low: float
    high: float
    value: float | None = None

    def __str__(self) -> str:
        top = "no upper limit" if math.isinf(self.high) else f"{self.high:.3g}"
        if self.value is None:
            return f"{self.low:.3g} .. {top}"
        return f"{self.value:.3g} ({self.low:.3g} .. {top})"


@dataclass(frozen=True)
class Residual:
    """A point beside the model's figure for it."""

    point: Point
    predicted_ms: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_ms / self.point.step_ms - 1.0


@dataclass(frozen=True)
class Calibration:
    """What the points of one setup say.

    Attributes:
        fitted: the parameters are determined; else they are intervals only.
        parameters: name -> Interval, in ms a step. Fitted: 95 % confidence; else feasible.
        residuals: of the fitted points.
        break_even: run without a cache -> hit rate above which the cache is faster (fitted only);
            above 1: never, below 0: always.
        undetermined: sentences on what the points cannot tell.
    """

    setup: Setup
    fitted: bool
    parameters: dict[str, Interval]
    residuals: tuple[Residual, ...]
    break_even: tuple[tuple[Point, float], ...]
    undetermined: tuple[str, ...]

    @property
    def bandwidth_gb_s(self) -> Interval | None:
        """The link's rate as miss_ms implies it; None when the bytes of a token are not known."""
        size = self.setup.token_bytes
        if size is None:
            return None
        miss = self.parameters["miss_ms"]
        low, high, value = (
            math.inf if ms == 0 else size / ms / 1e6 if ms is not None else None
            for ms in (miss.high, miss.low, miss.value)
        )
        assert low is not None and high is not None
        return Interval(low, high, value)

    def predict_ms(self, hit_rate: float, host_share: float = 1.0) -> float:
        """Milliseconds a step at a hit rate.

        Raises:
            UsageError: the parameters are not determined.
        """
        base, miss = (self.parameters[name].value for name in PARAMETERS)
        if base is None or miss is None:
            raise UsageError(
                f"{self.setup.name}: no prediction from fewer than {len(PARAMETERS) + 1} points"
                " with known hit rates"
            )
        return base + (1.0 - hit_rate) * host_share * miss


def calibrate(setup: Setup) -> Calibration:
    """Fit a setup's points if they suffice, else bound its parameters.

    Raises:
        SimlabError: no parameters agree with the points.
    """
    known = [point for point in setup.cached if point.misses is not None]
    if len(known) > len(PARAMETERS) and len({point.misses for point in known}) > 1:
        return _fit(setup, known)
    return _bound(setup)


def _fit(setup: Setup, known: Sequence[Point]) -> Calibration:
    from scipy.optimize import lsq_linear
    from scipy.stats import t

    measured = np.array([point.step_ms for point in known])
    # relative errors: a slow point does not outweigh the others
    design = np.array([[1.0, float(point.misses or 0.0)] for point in known]) / measured[:, None]
    found: npt.NDArray[np.float64] = lsq_linear(
        design, np.ones(len(known)), bounds=(0.0, np.inf), method="bvls"
    ).x
    freedom = len(known) - len(PARAMETERS)
    spread = float(((design @ found - 1.0) ** 2).sum()) / freedom
    half = t.ppf(0.975, freedom) * np.sqrt(np.diag(spread * np.linalg.inv(design.T @ design)))
    parameters = {
        name: Interval(max(0.0, value - width), value + width, value)
        for name, value, width in zip(PARAMETERS, found.tolist(), half.tolist(), strict=True)
    }
    base, miss = found.tolist()
    fitted = tuple(Residual(p, base + float(p.misses or 0.0) * miss) for p in known)
    even = tuple(
        (point, 1.0 - (point.step_ms - base) / miss) for point in setup.without_cache if miss > 0
    )
    open_ = [
        f"{point.label}: left out, its {_lacks(point)}"
        for point in setup.cached
        if point.misses is None
    ]
    open_.append(_SPLIT)
    return Calibration(setup, True, parameters, fitted, even, tuple(open_))


#: True of every set of points of this form.
_SPLIT = (
    "base_ms does not split into dense and expert compute, nor miss_ms into bandwidth, latency and"
    " overlap: all points are sums of both"
)


def _lacks(point: Point) -> str:
    lacking = []
    if point.hit_rate is None:
        lacking.append("hit rate")
    if point.host_share is None:
        lacking.append("share of experts on the host")
    return " and ".join(lacking) + " not being known"


def _bound(setup: Setup) -> Calibration:
    """The edges of the parameters that agree with every cached point within TOLERANCE.

    A point whose misses are not known has a share u of them, of which 0 <= u <= 1 (or 1 - hit rate
    where only the host share is not known): w = u x miss_ms is one more variable. No link is faster
    than it is specified.
    """
    from scipy.optimize import linprog

    points = setup.cached
    free = [point for point in points if point.misses is None]
    size = len(PARAMETERS) + len(free)
    rows: list[list[float]] = []
    limits: list[float] = []
    for point in points:
        row = [0.0] * size
        row[0] = 1.0
        if point.misses is None:
            at = len(PARAMETERS) + free.index(point)
            row[at] = 1.0
            most = 1.0 if point.hit_rate is None else 1.0 - point.hit_rate
            share = [0.0] * size
            share[at], share[1] = (
                1.0,
                -most * (1.0 if point.host_share is None else point.host_share),
            )
            rows.append(share)
            limits.append(0.0)
        else:
            row[1] = point.misses
        rows += [row, [-cell for cell in row]]
        limits += [point.step_ms * (1 + TOLERANCE), -point.step_ms * (1 - TOLERANCE)]
    edges: dict[str, Interval] = {}
    for at, name in enumerate(PARAMETERS):
        found = []
        for sign in (1.0, -1.0):
            goal = [0.0] * size
            goal[at] = sign
            bounds = [(0.0, None), (setup.least_miss_ms, None), *[(0.0, None)] * len(free)]
            solved = linprog(goal, A_ub=rows or None, b_ub=limits or None, bounds=bounds)
            if solved.status == 2:
                raise SimlabError(
                    f"{setup.name}: no parameters agree with its points within {TOLERANCE:.0%};"
                    " are hit rates and speeds of the same runs?"
                )
            found.append(math.inf if solved.status == 3 else float(solved.fun) * sign)
        edges[name] = Interval(*found)
    known = len(points) - len(free)
    open_ = [
        f"both parameters: {known} point{'' if known == 1 else 's'} with known misses, at least"
        f" {len(PARAMETERS) + 1} are needed; the intervals are what agrees with every point within"
        f" {TOLERANCE:.0%}, and nothing is predicted"
    ]
    open_ += [f"{point.label}: its {_lacks(point)}" for point in free]
    open_.append(_SPLIT)
    return Calibration(setup, False, edges, (), (), tuple(open_))


def whole_layers_ms(without_cache_ms: float, resident_ms: float, share: float) -> float:
    """Milliseconds a step with a share of the host's expert layers moved into VRAM instead.

    Each layer saves the same: its time on the host less its time on the device.

    Args:
        without_cache_ms: a step with all those layers computed on the host.
        resident_ms: a step with all of them resident (base_ms).
        share: of those layers that are resident, 0..1.
    """
    return without_cache_ms - share * (without_cache_ms - resident_ms)
