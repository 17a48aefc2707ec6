"""What a policy costs a token: processor time of its replay, one thread, and the bytes it keeps.

    python scripts/policy_cost.py experiments/gpt-oss-20b.toml lru,stale,mix [--slots 25%]

Medians of 5, the policies interleaved, load average printed. The whole replay of a step is timed:
looking up, choosing victims, keeping the policy's books. Times are the thread's, so that other work
on the machine disturbs them less; what is above LRU in the same run is what the policy costs.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench import load
from real_traces import Halves, read_experiment, read_picks

from simlab.analysis.stopwatch import interleaved
from simlab.policy.protocol import Group
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer


def state_bytes(replayer: Replayer, cell: Cell) -> int:
    """Bytes of a policy's arrays in the largest pool."""
    layers, meta = max(map(len, replayer.pools)), replayer.trace.meta
    keys = layers * meta.n_expert
    shape = Group(layers, meta.n_expert, keys, max(cell.slots), meta.k, 0, 0)
    return _bytes(cell.policy.new_state(shape, cell.params))


def _bytes(part: Any) -> int:
    if isinstance(part, tuple):
        return sum(map(_bytes, part))
    return part.nbytes if isinstance(part, np.ndarray) else 8


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("experiment", type=Path)
    parser.add_argument("policies", help="names or files, with parameters (mix-tr:lift=0.5)")
    parser.add_argument("--slots", default="25%,50%")
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--tokens", type=int, default=6000, help="of the second half")
    given = parser.parse_args()
    experiment = read_experiment(given.experiment)
    halves = Halves(read_picks(experiment), experiment.run, jobs=1)
    names = list(dict.fromkeys(["lru", *given.policies.split(",")]))
    for lanes in map(int, given.concurrency.split(",")):
        part = halves.held_out.first_steps(max(1, given.tokens // lanes))
        tokens = len(part.access(lanes).schedule.token)
        for size in given.slots.split(","):
            cells = [halves.cell(name, size, lanes) for name in names]
            replays = [partial(part.outcomes, cell) for cell in cells]
            found = interleaved(dict(zip(names, replays, strict=True)), clock=time.thread_time)
            print(f"{given.experiment.stem}, {size}, C = {lanes}, {tokens:,} tokens, {load()}")
            for (name, seconds), cell in zip(found.items(), cells, strict=True):
                each, above = (x / tokens * 1e6 for x in (seconds, seconds - found["lru"]))
                print(
                    f"  {name:<12} {each:7.2f} us a token, {above:+7.2f} over lru;"
                    f" {state_bytes(part, cell) / 1024:8.1f} KiB of state"
                )


if __name__ == "__main__":
    sys.exit(main())
