"""Rows on their way from the model to the trace, several steps at a time.

A step hands over its rows and goes on; a thread writes what has come together five times a second,
also while a long step runs. So writing costs next to nothing, and a kill loses less than a second.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.capture.engine import StepRows
from simlab.trace.write import TraceWriter

_SECONDS = 0.2


class Spool:
    """Writes the rows of steps through a `TraceWriter`; a context manager.

    Args:
        layers: the model's MoE layers, as `StepRows` has them.
        step: whether the trace records steps.
    """

    def __init__(self, writer: TraceWriter, layers: npt.ArrayLike, *, step: bool) -> None:
        self._writer = writer
        self._layers = np.asarray(layers)
        self._with_step = step
        self._waiting: list[StepRows] = []
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="simlab trace")
        self._thread.start()

    def put(self, rows: StepRows) -> None:
        """Take the rows of a step.

        Raises:
            TraceError: an earlier step could not be written.
        """
        if self._failure is not None:
            raise self._failure
        self._waiting.append(rows)

    def close(self) -> None:
        """Write what is left.

        Raises:
            TraceError: it, or an earlier step, could not be written.
        """
        self._end.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        self._drain()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(Exception):  # the failure that ends the block is the one to tell
                self.close()

    def _work(self) -> None:
        while not self._end.wait(_SECONDS):
            try:
                self._drain()
            except Exception as exc:
                self._failure = exc  # told to the next put
                return

    def _drain(self) -> None:
        with self._lock:
            count = len(self._waiting)
            steps = self._waiting[:count]
            for same in _of_one_shape(steps):
                self._append(same)
            del self._waiting[:count]
            if steps:
                self._writer.flush()

    def _append(self, steps: list[StepRows]) -> None:
        """Picks that ran no expert are left out, and rows without any pick."""
        experts = np.concatenate([s.experts for s in steps])
        n, depth, k = experts.shape
        experts = experts.reshape(n * depth, k)
        columns: dict[str, Any] = {
            name: np.repeat(np.concatenate([getattr(s, name) for s in steps]), depth)
            for name in ("request", "token", "phase")
        }
        columns["layer"] = np.tile(self._layers, n)
        if self._with_step:
            columns["step"] = np.repeat([s.step for s in steps], [len(s.token) for s in steps])
            columns["step"] = np.repeat(columns["step"], depth)
        weights = None
        if steps[0].weights is not None:
            weights = np.concatenate([s.weights for s in steps]).reshape(n * depth, k)
        ran = experts >= 0
        if not ran.all():
            lengths = ran.sum(1)
            columns = {name: column[lengths > 0] for name, column in columns.items()}
            columns["lengths"] = lengths[lengths > 0]
            experts = experts[ran]
            weights = None if weights is None else weights[ran]
        self._writer.append(**columns, experts=experts, weights=weights)


def _of_one_shape(steps: list[StepRows]) -> list[list[StepRows]]:
    """Runs of steps with equally many picks."""
    runs: list[list[StepRows]] = []
    for rows in steps:
        if runs and runs[-1][0].experts.shape[1:] == rows.experts.shape[1:]:
            runs[-1].append(rows)
        else:
            runs.append([rows])
    return runs
