"""Parameters of a policy, searched on one part of a trace and reported on the other.

Both parts are replayed from an empty cache. What is reported of the part that was not tuned on
stands beside the policy's defaults, LRU and the bounds, with intervals over its requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.analysis.bootstrap import FEWEST, Draws, Interval
from simlab.analysis.measure import tables, tables_and_rows
from simlab.analysis.metrics import Metric, figure_of, hit_rate, mib_per_token, of_policies, total
from simlab.analysis.search import Score, Space, Values, search
from simlab.errors import UsageError
from simlab.policy.registry import load_policy
from simlab.replay.by_request import RequestTable
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.result.schema import Result

#: One-sided 95 % of the normal distribution.
MARGIN = 1.645


@dataclass(frozen=True)
class Figures:
    """One policy on the held-out part.

    Attributes:
        label: "default", "tuned", or the policy's name. params: its values.
        hit_rate, mib_per_token, gap_closed: with intervals; gap_closed is the share of the misses
            between LRU and OPT that it saves. metric: the figure asked for.
        row: the result row, for files and reports.
    """

    label: str
    params: Mapping[str, float]
    hit_rate: Interval
    mib_per_token: Interval
    gap_closed: Interval
    metric: Interval
    row: Result

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the row."""
        parts = ("hit_rate", "mib_per_token", "gap_closed", "metric")
        return {
            "label": self.label,
            "policy": self.row.policy,
            "params": dict(self.params),
            "uploads_per_token": self.row.uploads_per_token,
            **{name: getattr(self, name).to_dict() for name in parts},
        }


@dataclass(frozen=True)
class Tuned:
    """What tuning found in one cell.

    Attributes:
        cell: slots and concurrency. params: the best values found. tried: how many were replayed.
        floor: hit rate asked for on the tuned part, or None. reached: the best values keep it, with
            a margin (see Tuner). kept: hit rate above what was asked for on the held-out part.
        tuned: the metric on the tuned part, by label. held_out: the figures on the other part.
        gain: how much better than the defaults the metric is there (above 0: better).
        bytes_ratio: bytes that LRU moves over those that the tuned policy moves, there.
        warnings: where the held-out part does not confirm.
        search: everything tried, best first: (values, shortfall of the hit rate, metric).
    """

    cell: Cell
    params: Values
    tried: int
    floor: float | None
    reached: bool
    kept: Interval
    tuned: dict[str, float | None]
    held_out: list[Figures]
    gain: Interval
    bytes_ratio: Interval
    warnings: list[str]
    search: list[tuple[Values, float, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "slots": list(self.cell.slots),
            "budget_bytes": self.cell.budget_bytes,
            "concurrency": self.cell.concurrency,
            "policy": self.cell.policy.name,
            "params": self.params,
            "tried": self.tried,
            "hit_rate_floor": self.floor,
            "floor_reached": self.reached,
            "held_out_hit_rate_above_floor": self.kept.to_dict(),
            "tuned_part": self.tuned,
            "held_out_part": [figures.to_dict() for figures in self.held_out],
            "gain_over_defaults": self.gain.to_dict(),
            "bytes_lru_over_tuned": self.bytes_ratio.to_dict(),
            "warnings": self.warnings,
            "search": [
                {"params": values, "hit_rate_shortfall": short, "metric": metric}
                for values, short, metric in self.search
            ],
        }


class Tuner:
    """Tunes one policy in several cells.

    Args:
        tuning, held_out: replayers of the two parts, under the same options.
        space: of the policy. metric: to be made best. floor: a hit rate, "lru" for LRU's own in the
            same cell, or None: values below it on the tuned part come after all others. It counts
            as kept from MARGIN standard errors over it, so that other requests keep it too.
        budget: replays a cell on the tuned part. resamples, confidence: of the intervals.
        jobs: replays at a time.
    """

    def __init__(
        self,
        tuning: Replayer,
        held_out: Replayer,
        space: Space,
        metric: Metric,
        *,
        floor: float | str | None = None,
        budget: int = 60,
        seed: int = 0,
        resamples: int = 10_000,
        confidence: float = 0.95,
        jobs: int = 1,
    ) -> None:
        if not 2 <= budget <= 100_000:
            raise UsageError(f"--budget must be 2 to 100000 replays, not {budget}")
        self.parts, self.space, self.metric = (tuning, held_out), space, metric
        self.floor, self.budget, self.seed, self.jobs = floor, budget, seed, jobs
        self.resamples, self.confidence = resamples, confidence

    def tune(self, cell: Cell, done: Callable[[int], None] | None = None) -> Tuned:
        """Tune one cell; the cell's parameters play no part.

        Args:
            done: told how many replays were done since the last call.
        """
        tuning = self.parts[0]
        lru = replace(cell, policy=load_policy("lru"), params={})
        opt = replace(cell, policy=load_policy("opt"), params={})
        reference = tables(tuning, [lru, opt], jobs=self.jobs)
        floor = total(reference[0], hit_rate) if self.floor == "lru" else self.floor
        assert not isinstance(floor, str)

        def evaluate(points: Sequence[Values]) -> list[Score]:
            cells = [replace(cell, params=point) for point in points]
            measured = tables(tuning, cells, jobs=self.jobs)
            if done is not None:
                done(len(points))
            return [self._score(table, reference[0], floor) for table in measured]

        found = search(self.space, evaluate, budget=self.budget, seed=self.seed)
        best, (shortfall, _) = found[0]
        sign = -1.0 if self.metric.higher else 1.0
        defaults = {**self.space.policy.values(), **self.space.fixed}
        tuned = {
            "default": next((sign * s[1] for v, s in found if _same(v, defaults)), None),
            "tuned": sign * found[0][1][1],
            "lru": total(reference[0], self.metric.figure),
            "opt": total(reference[1], self.metric.figure),
        }
        return self._report(cell, best, tuned, floor, shortfall <= 0, found, sign)

    def _score(self, table: RequestTable, lru: RequestTable, floor: float | None) -> Score:
        value = total(table, self.metric.figure)
        assert value is not None
        shortfall = 0.0
        if floor is not None:
            asked = lru.hits if self.floor == "lru" else floor * table.lookups
            shortfall = max(0.0, -surely_above(table.hits - asked, table.lookups))
        return shortfall, -value if self.metric.higher else value

    def _report(
        self,
        cell: Cell,
        best: Values,
        tuned: dict[str, float | None],
        floor: float | None,
        reached: bool,
        found: list[tuple[Values, Score]],
        sign: float,
    ) -> Tuned:
        held_out = self.parts[1]
        policy = self.space.policy
        cells = {
            "default": replace(cell, params=dict(self.space.fixed)),
            "tuned": replace(cell, params=best),
            "lru": replace(cell, policy=load_policy("lru"), params={}),
            "opt": replace(cell, policy=load_policy("opt"), params={}),
        }
        if policy.declines:
            cells["opt-bypass"] = replace(cell, policy=load_policy("opt-bypass"), params={})

        both = tables_and_rows(held_out, list(cells.values()), jobs=self.jobs)
        measured = dict(zip(cells, (table for table, _ in both), strict=True))
        draws = Draws(
            of_policies(measured),
            resamples=self.resamples,
            seed=self.seed,
            confidence=self.confidence,
        )
        figures = [
            Figures(
                label=label,
                params=row.params,
                hit_rate=draws.interval(figure_of(label, hit_rate)),
                mib_per_token=draws.interval(figure_of(label, mib_per_token)),
                gap_closed=draws.gap_closed(f"{label}/misses", "lru/misses", "opt/misses"),
                metric=draws.interval(figure_of(label, self.metric.figure)),
                row=row,
            )
            for label, (_, row) in zip(cells, both, strict=True)
        ]
        ours, before = (figure_of(name, self.metric.figure) for name in ("tuned", "default"))
        gain = draws.interval(lambda sums: sign * (before(sums) - ours(sums)))
        ratio = draws.interval(lambda sums: sums["lru/moved"] / sums["tuned/moved"])
        rate, lru = figure_of("tuned", hit_rate), figure_of("lru", hit_rate)
        asked = lru if self.floor == "lru" else lambda sums: floor or 0.0
        kept = draws.interval(lambda sums: rate(sums) - asked(sums))
        return Tuned(
            cell=cell,
            params=best,
            tried=len(found),
            floor=floor,
            reached=reached,
            kept=kept,
            tuned=tuned,
            held_out=figures,
            gain=gain,
            bytes_ratio=ratio,
            warnings=self._warnings(kept, gain, floor, reached, best),
            search=[(values, score[0], sign * score[1]) for values, score in found],
        )

    def _warnings(
        self,
        kept: Interval,
        gain: Interval,
        floor: float | None,
        reached: bool,
        best: Values,
    ) -> list[str]:
        found = []
        if not reached:
            found.append(
                f"no values reach a hit rate of {floor:.2%} on the tuned part: these come nearest"
            )
        same = _same(best, {**self.space.policy.values(), **self.space.fixed})
        if same:
            found.append("nothing better than the defaults was found on the tuned part")
        elif gain.estimate is not None and gain.estimate < 0:
            found.append("NOT CONFIRMED: on the held-out part the defaults are better")
        elif gain.requests >= FEWEST and gain.sign <= 0:
            found.append("not confirmed: on the held-out part the gain may be chance")
        if floor is not None and reached and (kept.estimate or 0.0) < 0:
            what = "NOT CONFIRMED" if kept.sign < 0 else "not confirmed, though it may be chance"
            found.append(
                f"{what}: on the held-out part the hit rate is {-100 * (kept.estimate or 0):.2f}"
                " points below what was asked for"
            )
        if gain.requests < FEWEST:
            found.append(
                f"{gain.requests} held-out request{'s' * (gain.requests != 1)}: too few for"
                f" intervals ({FEWEST} are the least), so nothing says how far these figures carry"
            )
        return found


def surely_above(difference: npt.NDArray[np.float64], lookups: npt.NDArray[np.float64]) -> float:
    """A difference in hit rate over requests, less MARGIN of its standard errors (of a ratio)."""
    rate = float(difference.sum() / lookups.sum())
    n = len(lookups)
    if n < FEWEST:
        return rate
    spread = float(np.std(difference - rate * lookups, ddof=1)) * math.sqrt(n)
    return rate - MARGIN * spread / float(lookups.sum())


def _same(values: Mapping[str, float], others: Mapping[str, float]) -> bool:
    return all(values.get(name, other) == other for name, other in others.items())
