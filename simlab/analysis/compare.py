"""Two policies on the same trace: is the difference more than the choice of requests?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simlab.analysis.bootstrap import FEWEST, Draws, Interval
from simlab.analysis.measure import tables_and_rows
from simlab.analysis.metrics import Metric, figure_of, metric_of, of_policies
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.result.schema import Result

NO_DIFFERENCE = "no significant difference"
TOO_FEW = "too few requests to tell"


@dataclass(frozen=True)
class Difference:
    """A metric of A and of B, A minus B, and the verdict."""

    metric: Metric
    a: Interval
    b: Interval
    difference: Interval
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        parts = {name: getattr(self, name).to_dict() for name in ("a", "b", "difference")}
        return {"metric": self.metric.name, **parts, "verdict": self.verdict}


@dataclass(frozen=True)
class Comparison:
    """Two policies in one cell; ``rows`` are their result rows."""

    cell: Cell
    differences: list[Difference]
    rows: tuple[Result, Result]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "slots": list(self.cell.slots),
            "budget_bytes": self.cell.budget_bytes,
            "concurrency": self.cell.concurrency,
            "differences": [difference.to_dict() for difference in self.differences],
        }


def compare(
    replayer: Replayer,
    pairs: Sequence[tuple[Cell, Cell]],
    *,
    resamples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
    jobs: int = 1,
) -> list[Comparison]:
    """Compare policies cell by cell, in hit rate and, where bytes are known, in MiB per token.

    Args:
        pairs: A and B in cells of one size and concurrency.

    Raises:
        UsageError: no step takes the cached path, or an option of the bootstrap is not allowed.
    """
    both = tables_and_rows(replayer, [cell for pair in pairs for cell in pair], jobs=jobs)
    metrics = [metric_of("hit_rate")]
    if replayer.layer_bytes is not None:
        metrics.append(metric_of("bytes_moved"))
    found = []
    for i, (cell, _) in enumerate(pairs):
        (a, row_a), (b, row_b) = both[2 * i], both[2 * i + 1]
        draws = Draws(
            of_policies({"a": a, "b": b}), resamples=resamples, seed=seed, confidence=confidence
        )
        differences = [_difference(draws, metric) for metric in metrics]
        found.append(Comparison(cell, differences, (row_a, row_b)))
    return found


def _difference(draws: Draws, metric: Metric) -> Difference:
    a, b = (figure_of(label, metric.figure) for label in ("a", "b"))
    difference = draws.interval(lambda sums: a(sums) - b(sums))
    if draws.requests < FEWEST:
        verdict = TOO_FEW
    elif difference.sign == 0:
        verdict = NO_DIFFERENCE
    else:
        verdict = "A better" if (difference.sign > 0) == metric.higher else "B better"
    return Difference(metric, draws.interval(a), draws.interval(b), difference, verdict)
