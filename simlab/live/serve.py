"""How a layer's experts get to where it computes: through the cache, or as a baseline does it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simlab.errors import SimlabError
from simlab.live.engine import Engine, Run
from simlab.live.planner import Planner
from simlab.replay.kernel import DECLINED, LARGE_HIT, LARGE_STREAMED


class CachedPath:
    """The cache of one group as its policy runs it, the gate's large path included.

    Args:
        stream: declined misses are copied, used and dropped; else the CPU is said to serve them,
            and its work is not done.
    """

    def __init__(
        self, engine: Engine, group: int, planner: Planner, run: Run, *, stream: bool
    ) -> None:
        self._engine, self._lane = engine, engine.lanes[group]
        self._plan, self._run = planner.groups[group], run
        self._offsets = engine.access.offsets.tolist()
        # without a slot nothing is cached: what it takes is what a declined miss takes
        self._stream = stream
        self._stream_large = stream or self._plan.group.slots > 0

    def __call__(self, number: int, layer: int, picks: npt.NDArray[np.int64], tokens: int) -> int:
        """Plan, upload what the plan says, remember what became of each lookup."""
        plan, run, engine = self._plan, self._run, self._engine
        started = time.perf_counter()
        plan.plan(layer, picks, tokens)
        n, _, n_runs = plan.counts.tolist()
        first = self._offsets[number]
        last = self._offsets[number + 1]
        if last - first != n:
            raise SimlabError(f"internal error: access set {number} differs from the replayer's")
        run.outcome[first:last] = plan.outcome[:n]
        run.experts[first:last] = plan.experts[:n]
        run.runs[number] = n_runs
        engine.planned(time.perf_counter() - started)
        rows = self._lane.rows
        rows[:n] = plan.slots[:n]
        outcome = plan.outcome[:n].tolist()
        if outcome[0] >= LARGE_HIT:
            return self._large(layer, outcome, n)
        declined = [i for i, code in enumerate(outcome) if code == DECLINED]
        if n_runs or (declined and self._stream):
            source, row = self._lane.sources[layer], self._lane.pool.slots
            with engine.uploads(self._lane.pool) as pool:
                for expert, slot, count in plan.runs[:n_runs].tolist():
                    pool.upload(source, expert, slot, count)
                if self._stream:
                    for i in declined:
                        pool.upload(source, int(plan.experts[i]), row)
                        rows[i] = row
                        row += 1
        if declined and not self._stream:
            kept = rows[:n][rows[:n] >= 0]
            rows[: len(kept)] = kept
            return len(kept)
        return n

    def _large(self, layer: int, outcome: Sequence[int], n: int) -> int:
        """Every expert goes to the staging rows: residents on the device, the others streamed."""
        lane, plan = self._lane, self._plan
        source, row = lane.sources[layer], lane.pool.slots
        with self._engine.uploads(lane.pool) as pool:
            for i, code in enumerate(outcome):
                if code == LARGE_STREAMED and not self._stream_large:
                    continue
                if code == LARGE_STREAMED:
                    pool.upload(source, int(plan.experts[i]), row)
                else:
                    pool.move(int(plan.slots[i]), row)
                lane.rows[row - pool.slots] = row
                row += 1
        return row - lane.pool.slots


class StreamPicks:
    """Baseline: every distinct expert that the step picks crosses, one copy per tensor."""

    def __init__(self, engine: Engine, group: int) -> None:
        self._engine, self._lane = engine, engine.lanes[group]

    def __call__(self, number: int, layer: int, picks: npt.NDArray[np.int64], tokens: int) -> int:
        """Copy the picked experts to the staging rows."""
        lane = self._lane
        source, row = lane.sources[layer], lane.pool.slots
        with self._engine.uploads(lane.pool) as pool:
            for expert in np.unique(picks).tolist():
                pool.upload(source, expert, row)
                lane.rows[row - pool.slots] = row
                row += 1
        return row - lane.pool.slots


class StreamAll:
    """Baseline: every weight of the layer crosses, in one copy per tensor."""

    def __init__(self, engine: Engine, group: int) -> None:
        self._engine, self._lane = engine, engine.lanes[group]
        self._n = engine.bank.layout.n_expert

    def __call__(self, number: int, layer: int, picks: npt.NDArray[np.int64], tokens: int) -> int:
        """Copy the whole layer to the staging rows."""
        lane = self._lane
        with self._engine.uploads(lane.pool) as pool:
            pool.upload(lane.sources[layer], 0, pool.slots, self._n)
        used = np.unique(picks)
        lane.rows[: len(used)] = used + lane.pool.slots
        return len(used)


class Resident:
    """Baseline: every expert is in device memory already; nothing crosses.

    Rows are taken modulo the pool, so that a pool of any size stands for a whole one.
    """

    def __init__(self, engine: Engine, group: int) -> None:
        self._lane, self._n = engine.lanes[group], engine.bank.layout.n_expert

    def __call__(self, number: int, layer: int, picks: npt.NDArray[np.int64], tokens: int) -> int:
        """Copy nothing."""
        lane = self._lane
        used = np.unique(picks)
        rows = (layer * self._n + used) % (lane.pool.slots + lane.pool.staging)
        lane.rows[: len(used)] = rows
        return len(used)
