"""Cells replayed for an analysis: their counters by request, and their result rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from simlab.errors import UsageError
from simlab.replay.by_request import RequestTable, by_request
from simlab.replay.cell import Cell
from simlab.replay.grid import over_cells
from simlab.replay.row import result_row
from simlab.replay.run import Replayer
from simlab.result.schema import Result

_Progress = Callable[[int], None] | None


def tables(replayer: Replayer, cells: Sequence[Cell], *, jobs: int = 1) -> list[RequestTable]:
    """Counters by request of each cell.

    Raises:
        UsageError: no step takes the cached path, so there is no hit rate.
    """

    def work(cell: Cell, progress: _Progress) -> RequestTable:
        return _cached(by_request(replayer, replayer.outcomes(cell, progress)))

    return list(over_cells(work, replayer, cells, jobs=jobs))


def tables_and_rows(
    replayer: Replayer, cells: Sequence[Cell], *, jobs: int = 1
) -> list[tuple[RequestTable, Result]]:
    """The same beside each cell's result row."""

    def work(cell: Cell, progress: _Progress) -> tuple[RequestTable, Result]:
        started = time.time()
        outcomes = replayer.outcomes(cell, progress)
        table = _cached(by_request(replayer, outcomes))
        return table, result_row(replayer, cell, outcomes, started)

    return list(over_cells(work, replayer, cells, jobs=jobs))


def _cached(table: RequestTable) -> RequestTable:
    if not table.lookups.sum():
        raise UsageError(
            "no step passes the gate at these slots: nothing is cached, so there is no hit rate;"
            " give more --slots or a lower --concurrency"
        )
    return table
