"""Intervals by the bootstrap over requests: how far would another sample of requests move a figure?

Requests are drawn anew with replacement, as many as there are, and the figure is computed from the
sums over those drawn: a rate is a ratio of sums, never a mean of rates. Whatever is compared is
computed from the same draws (paired). Percentile intervals: Efron & Tibshirani 1993, An
Introduction to the Bootstrap, chapter 13.

An interval speaks of requests like those of the trace, one independent of the other. Policies meet
them in the trace's order and with the cache that the request before left; that is not drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.errors import UsageError

RESAMPLES = 10_000
CONFIDENCE = 0.95
#: With fewer requests no interval is given: there is too little to draw from.
FEWEST = 5
_CELLS_AT_ONCE = 1 << 22

#: Sums over requests, by name, each float64 [...], to a figure [...].
Figure = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Interval:
    """A figure with its interval.

    Attributes:
        estimate: of the requests as they are; None where it is not defined (nothing over nothing).
        low, high: bounds; None when there are fewer than FEWEST requests, or when the figure is not
            defined in every draw.
        requests, confidence: what the interval is of.
    """

    estimate: float | None
    low: float | None
    high: float | None
    requests: int
    confidence: float = CONFIDENCE

    @property
    def sign(self) -> int:
        """1 or -1 when the whole interval is above or below 0, else 0."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Draws:
    """Resampled sums of per-request counters, the same draws for all that is asked of them.

    Args:
        columns: name -> float64 [n], counters of n requests, in one order.
        resamples: number of draws, 1 or more. seed: of the draws. confidence: of the intervals.

    Raises:
        UsageError: resamples or confidence is not allowed.
    """

    def __init__(
        self,
        columns: Mapping[str, npt.NDArray[np.float64]],
        *,
        resamples: int = RESAMPLES,
        seed: int = 0,
        confidence: float = CONFIDENCE,
    ) -> None:
        if not 100 <= resamples <= 1_000_000:
            raise UsageError(f"--resamples must be 100 to 1000000, not {resamples}")
        if not 0 < confidence < 1:
            raise UsageError(f"--confidence must be between 0 and 1, not {confidence:g}")
        table = np.stack([np.asarray(column, np.float64) for column in columns.values()], axis=1)
        self.requests, self.confidence = len(table), confidence
        self.total = dict(zip(columns, table.sum(axis=0), strict=True))
        self.sums: dict[str, npt.NDArray[np.float64]] = {}
        if self.requests >= FEWEST:
            drawn = resampled_sums(table, resamples, seed)
            self.sums = {name: drawn[:, i] for i, name in enumerate(columns)}

    def interval(self, figure: Figure) -> Interval:
        """A figure of the sums, with its interval.

        Args:
            figure: takes sums by name and gives the figure; computed for all draws at once.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            estimate = float(figure(self.total))
            known = np.isfinite(estimate)
            low = high = None
            if self.sums and known:
                drawn = np.asarray(figure(self.sums), np.float64)
                if np.isfinite(drawn).all():
                    tail = (1 - self.confidence) / 2
                    low, high = (float(q) for q in np.quantile(drawn, [tail, 1 - tail]))
        return Interval(estimate if known else None, low, high, self.requests, self.confidence)

    def ratio(self, above: str, below: str) -> Interval:
        """Sum over sum: a hit rate, bytes a token."""
        return self.interval(lambda sums: np.divide(sums[above], sums[below]))

    def gap_closed(self, policy: str, reference: str, bound: str) -> Interval:
        """Share of the gap from ``reference`` to ``bound`` that ``policy`` closes, in misses.

        Args:
            policy, reference, bound: names of columns of misses (as a rule of a policy, of LRU and
                of OPT). 1: as good as the bound; 0: no better than the reference.
        """

        def closed(sums: Mapping[str, Any]) -> Any:
            return np.divide(sums[reference] - sums[policy], sums[reference] - sums[bound])

        return self.interval(closed)


def resampled_sums(
    table: npt.NDArray[np.float64], resamples: int, seed: int
) -> npt.NDArray[np.float64]:
    """Column sums over requests drawn with replacement.

    Args:
        table: float64 [n, columns].

    Returns:
        float64 [resamples, columns].
    """
    rng = np.random.default_rng(seed & (2**64 - 1))
    n = len(table)
    result = np.empty((resamples, table.shape[1]))
    at_once = max(1, _CELLS_AT_ONCE // n)
    for first in range(0, resamples, at_once):
        count = min(at_once, resamples - first)
        # how often each request is drawn, [count, n]
        drawn = rng.multinomial(n, np.full(n, 1 / n), size=count)
        result[first : first + count] = drawn @ table
    return result
