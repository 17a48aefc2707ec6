"""How fast functions are beside each other: medians of runs in turn, right on clocks that tick."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

#: Some systems count processor time in steps of 10 ms: a time must be long against that.
LEAST_SECONDS = 0.1


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of one run of each, timed in turn after a warm-up.

    Args:
        contenders: name -> what to run.
        rounds: times that each is timed; every time it runs as often as fills LEAST_SECONDS.
        clock: seconds; ``time.process_time`` where other programs should not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(rounds):
        for name, run in contenders.items():
            runs, passed, started = 0, 0.0, clock()
            while passed < LEAST_SECONDS:
                run()
                runs += 1
                passed = clock() - started
            seconds[name].append(passed / runs)
    return {name: median(each) for name, each in seconds.items()}
