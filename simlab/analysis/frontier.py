"""The exact frontier of hits against uploads, and how far from it policies are.

A point is the best that any policy could do if an upload had to earn ``mu`` hits (flow.py). Between
points the frontier lies below the lines ``hits = best + mu x (uploads - its uploads)``; the lowest
of these lines bounds every policy. All of it counts the cached path only, in windows of steps that
each start from an empty cache, whose figures are added up; misses that fill no slot are free here,
which is why the engine has to serve them by the CPU: where they are streamed, they cost the bytes
of an upload, and the frontier shrinks to the one point of ``opt-bypass``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simlab.analysis.flow import SCALE, Uses, best_of, need_solver, scaled_costs
from simlab.analysis.reuse import reuse_distances
from simlab.errors import SimlabError, UsageError
from simlab.policy.registry import load_policy
from simlab.replay.access import EVERY_PICK
from simlab.replay.cell import Cell
from simlab.replay.grid import over_cells
from simlab.replay.kernel import HIT, UPLOADED
from simlab.replay.run import Replayer

MUS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
#: Lookups of a window that the solver answers for in seconds; it grows faster than they do.
WINDOW_LOOKUPS = 20_000


@dataclass(frozen=True)
class Point:
    """One point: of the frontier (``mu``) or of a policy.

    Attributes:
        uploads: of each pool. moved: their bytes (the uploads, where bytes are unknown).
        hit_rate: hits per lookup of the cached path.
    """

    hits: int
    uploads: tuple[int, ...]
    moved: int
    hit_rate: float
    mu: float | None = None
    policy: str = ""
    params: dict[str, float] | None = None
    most_hits: int | None = None
    least_moved: int | None = None


@dataclass(frozen=True)
class Frontier:
    """The frontier of one cell, and policies below it.

    Attributes:
        windows: (first step, steps) of each. whole: they are the whole run, as one window.
        covered: share of the run's steps that they hold. lookups, tokens: in them, on the cached
            path. points: by ascending mu. policies: with ``most_hits``, what no policy with their
            uploads exceeds, and ``least_moved``, what no policy with their hits stays below.
    """

    cell: Cell
    windows: list[tuple[int, int]]
    whole: bool
    covered: float
    lookups: int
    tokens: int
    bytes_known: bool
    points: list[Point]
    policies: list[Point]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "slots": list(self.cell.slots),
            "concurrency": self.cell.concurrency,
            "windows": [{"first_step": first, "steps": n} for first, n in self.windows],
            "whole_run_in_one_window": self.whole,
            "share_of_steps": self.covered,
            "lookups": self.lookups,
            "tokens": self.tokens,
            "bytes_known": self.bytes_known,
            "frontier": [asdict(point) for point in self.points],
            "policies": [asdict(point) for point in self.policies],
        }


def choose_windows(n_steps: int, each: int, count: int | None) -> list[tuple[int, int]]:
    """Windows of ``each`` steps: (first step, steps).

    Args:
        count: how many, spread evenly from the first step to the last; None: as many as cover all.
    """
    if each >= n_steps:
        return [(0, n_steps)]
    if count is None or count * each >= n_steps:
        return [(first, min(each, n_steps - first)) for first in range(0, n_steps, each)]
    room = n_steps - each
    return [(room * i // max(1, count - 1), each) for i in range(count)]


def frontier(
    replayer: Replayer,
    cell: Cell,
    policies: Sequence[Cell],
    *,
    mus: Sequence[float] = MUS,
    windows: int | None = 3,
    window_steps: int | None = None,
    jobs: int = 1,
    done: Callable[[int], None] | None = None,
) -> Frontier:
    """The frontier of a cell (its policy plays no part), and where policies are.

    Args:
        policies: cells of the same size and concurrency. mus: hits that an upload has to earn.
        windows: see choose_windows. window_steps: steps of a window; None: as many as hold about
            WINDOW_LOOKUPS lookups. done: told of every point.

    Raises:
        UsageError: OR-tools is missing, an argument is not allowed, or the semantics have no such
            frontier.
    """
    need_solver()
    _check(replayer, mus, windows, window_steps)
    access = replayer.access(cell.concurrency)
    n_steps = len(access.step_tokens)
    if window_steps is None:
        window_steps = max(1, round(WINDOW_LOOKUPS * n_steps / max(1, len(access.experts))))
    spans = choose_windows(n_steps, window_steps, windows)
    parts = [replayer.window(first, n) for first, n in spans]
    pools = [_uses(part, cell) for part in parts]
    sizes = [group.expert_bytes or 1 for group in replayer.layout.groups]
    mean = float(np.mean(sizes))
    weights = [size / mean for size in sizes]
    lookups = sum(len(uses.time) for window in pools for uses in window)
    if not lookups:
        raise UsageError("no step of the windows passes the gate at these slots: give more --slots")
    bypass = Cell(load_policy("opt-bypass"), cell.slots, None, cell.concurrency)
    found = [_replayed(part, [bypass, *policies], jobs) for part in parts]
    most = sum(window[0][0] for window in found)
    values: list[tuple[int, list[int], int]] = []  # worth, costs, value of each mu
    points: list[Point] = []
    for mu in sorted(set(mus)):
        worth, costs = (
            (SCALE, [max(1, round(w)) for w in weights])
            if mu == 0
            else scaled_costs(mu, weights, lookups)
        )
        hits, uploads = _solve(pools, worth, costs, jobs)
        if mu == 0 and hits != most:  # a hit was given away for many uploads
            worth, costs = scaled_costs(0, weights, lookups)
            hits, uploads = _solve(pools, worth, costs, jobs)
        if hits > most or (mu == 0 and hits != most):
            raise SimlabError("internal error: the frontier and opt-bypass do not agree")
        values.append((worth, costs, worth * hits - _cost(costs, uploads)))
        points.append(Point(hits, uploads, _cost(sizes, uploads), hits / lookups, mu))
        if done is not None:
            done(1)
    return Frontier(
        cell=cell,
        windows=spans,
        whole=len(spans) == 1 and spans[0][1] == n_steps,
        covered=sum(n for _, n in spans) / n_steps,
        lookups=lookups,
        tokens=sum(_tokens(part, cell) for part in parts),
        bytes_known=replayer.layer_bytes is not None,
        points=points,
        policies=[
            _bounded(found, i + 1, one, values, sizes, lookups) for i, one in enumerate(policies)
        ],
    )


def _check(
    replayer: Replayer, mus: Sequence[float], windows: int | None, window_steps: int | None
) -> None:
    if replayer.semantics not in ("llama.cpp", "per-pick"):
        raise UsageError(
            f"the frontier is of pools of equal slots that start empty: not of --semantics"
            f" {replayer.semantics}"
        )
    if replayer.on_decline != "cpu":
        raise UsageError(
            "where declined misses are streamed they cost the bytes of an upload, and the frontier"
            " is the one point of opt-bypass: take --on-decline cpu"
        )
    if not mus or not all(0 <= mu <= 10_000 for mu in mus):
        raise UsageError("--mu takes numbers from 0 to 10000: hits that an upload has to earn")
    if windows is not None and windows < 1:
        raise UsageError(f"--windows must be 1 or more, or all, not {windows}")
    if window_steps is not None and window_steps < 1:
        raise UsageError(f"--window-steps must be 1 or more, not {window_steps}")


def _uses(part: Replayer, cell: Cell) -> list[Uses]:
    """The cached-path lookups of each pool of a window."""
    access, n_expert = part.access(cell.concurrency), part.trace.meta.n_expert
    sizes = np.diff(access.offsets)
    found = []
    for number, members in enumerate(part.pools):
        index = np.full(len(part.trace.meta.moe_layers), -1, np.int32)
        index[members] = np.arange(len(members))
        served = part.on_cached_path(access, part.slots_by_step(cell, number))
        _, previous = reuse_distances(access, served, index, n_expert)
        chosen = np.flatnonzero(np.repeat(served & (index[access.set_layer] >= 0), sizes))
        rank = np.full(len(access.experts) + 1, -1, np.int64)  # its last entry is that of -1
        rank[chosen] = np.arange(len(chosen))
        of_set = np.repeat(np.arange(len(sizes)), sizes)[chosen]
        time = np.unique(of_set, return_inverse=True)[1]
        if access.order == EVERY_PICK:  # every pick is served by itself
            time = np.arange(len(chosen))
        found.append(Uses(time.astype(np.int64), rank[previous[chosen]], part.slots(cell, number)))
    return found


def _tokens(part: Replayer, cell: Cell) -> int:
    """Tokens of the steps that take the cached path in some pool."""
    access = part.access(cell.concurrency)
    steps: set[int] = set()
    for number, members in enumerate(part.pools):
        served = part.on_cached_path(access, part.slots_by_step(cell, number))
        steps.update(access.set_step[served & np.isin(access.set_layer, members)].tolist())
    return int(access.step_tokens[sorted(steps)].sum())


_Counted = tuple[int, tuple[int, ...]]


def _replayed(part: Replayer, cells: Sequence[Cell], jobs: int) -> list[_Counted]:
    """Cached-path hits, and uploads by pool, of each cell."""

    def work(cell: Cell, progress: Any) -> _Counted:
        outcomes = part.outcomes(cell, progress)
        layer = np.repeat(outcomes.access.set_layer, np.diff(outcomes.access.offsets))
        uploaded = layer[outcomes.outcome == UPLOADED]
        hits = int((outcomes.outcome == HIT).sum())
        return hits, tuple(int(np.isin(uploaded, members).sum()) for members in part.pools)

    return list(over_cells(work, part, cells, jobs=jobs))


def _solve(
    pools: Sequence[Sequence[Uses]],
    worth: int,
    costs: Sequence[int],
    jobs: int,
) -> _Counted:
    """Hits and uploads by pool over all windows."""
    tasks = [(w, p) for w in range(len(pools)) for p in range(len(costs))]

    def one(task: tuple[int, int]) -> tuple[int, int]:
        return best_of(pools[task[0]][task[1]], worth, costs[task[1]])

    with ThreadPoolExecutor(jobs) as threads:  # the solver releases the GIL
        solved = dict(zip(tasks, threads.map(one, tasks), strict=True))
    uploads = [sum(solved[w, p][1] for w in range(len(pools))) for p in range(len(costs))]
    return sum(hits for hits, _ in solved.values()), tuple(uploads)


def _cost(each: Sequence[int], uploads: Sequence[int]) -> int:
    return sum(cost * n for cost, n in zip(each, uploads, strict=True))


def _bounded(
    found: Sequence[Sequence[_Counted]],
    number: int,
    cell: Cell,
    values: Sequence[tuple[int, list[int], int]],
    sizes: Sequence[int],
    lookups: int,
) -> Point:
    """A policy's point with what the frontier's lines say of it."""
    hits = sum(window[number][0] for window in found)
    uploads = tuple(int(sum(column)) for column in zip(*(w[number][1] for w in found), strict=True))
    lines = [(value + _cost(costs, uploads)) // worth for worth, costs, value in values]
    most = min(*lines, sum(window[0][0] for window in found))  # opt-bypass's hits
    least = 0.0
    for worth, costs, value in values:
        # costs are bytes over their mean, scaled: so many bytes a unit of cost
        per_cost = min(size / cost for size, cost in zip(sizes, costs, strict=True))
        least = max(least, (worth * hits - value) * per_cost)
    return Point(
        hits,
        uploads,
        _cost(sizes, uploads),
        hits / lookups,
        policy=cell.policy.name,
        params=cell.policy.values(cell.params),
        most_hits=most,
        least_moved=int(least),
    )
