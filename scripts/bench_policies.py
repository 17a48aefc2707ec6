"""Speed of the policies: medians of 5, the contenders interleaved, load average printed.

    python scripts/bench_policies.py [constant] [mixes] [--picks N]

`constant`: every policy whose work is O(1) a lookup, through the generic kernel under `llama.cpp`,
and per pick beside its namesake of PyPI's libcachesim on the same accesses; a quarter of 48 x 128
keys. `mixes`: microseconds a token of the policies that score keys by layer visits, 24 x 32 keys,
k = 4. The seconds are those of the processor in this thread, for both sides, so that other work on
the machine counts less. `make bench` runs both.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import libcachesim
from bench import load, oracle_general, run_sections, sticky_trace

from simlab.analysis.stopwatch import interleaved
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer

#: Policy -> its namesake in libcachesim, where one exists.
CONSTANT = {
    "fifo": "FIFO",
    "random": "Random",
    "lru": "LRU",
    "clock": "Clock",
    "sieve": "Sieve",
    "s3fifo": "S3FIFO",
    "slru": "SLRU",
    "twoq": "TwoQ",
    "arc": "ARC",
    "lirs": "LIRS",
    "lfu": "LFU",
    "w-tinylfu": "WTinyLFU",
    "lecar": "LeCaR",
    "heat-lru": None,
    "capped-lru": None,
}
WANTED = 20  # M lookups/s
MIXES = {"lru": None, "stale": None, "mix": 12, "mix-tr": 30, "mix-trace": None}


def bench_constant(picks: int) -> None:
    """M lookups/s of each, and how many times as fast as its namesake per pick."""
    trace = sticky_trace(48, 128, 8, picks)
    slots = 48 * 128 // 4
    whole, per_pick = Replayer(trace), Replayer(trace, semantics="per-pick")
    whole.access(1), per_pick.access(1)
    lookups = trace.n_picks
    print(f"\n48 x 128 keys, k = 8, {slots} slots, {lookups:,} lookups, {load()}")
    print(f"  M lookups/s (wanted: {WANTED}); per pick, times libcachesim's speed (wanted: 1)")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "accesses.oracleGeneral.bin"
        oracle_general(trace).tofile(file)
        for name, other in CONSTANT.items():
            cell = Cell(load_policy(name), (slots,))
            contenders: dict[str, Callable[[], Any]] = {
                "ours": partial(whole.outcomes, cell),
                "per pick": partial(per_pick.outcomes, cell),
            }
            if other is not None:
                contenders["theirs"] = partial(_process, other, slots, file)
            found = interleaved(contenders, clock=time.process_time)
            ratio = f"{found['theirs'] / found['per pick']:5.1f} x" if other is not None else ""
            print(f"  {name:<11} {lookups / found['ours'] / 1e6:6.1f}   {ratio}")


def _process(name: str, slots: int, file: Path) -> None:
    reader = libcachesim.TraceReader(
        str(file),
        libcachesim.TraceType.ORACLE_GENERAL_TRACE,
        libcachesim.ReaderInitParam(ignore_obj_size=True),
    )
    getattr(libcachesim, name)(cache_size=slots).process_trace(reader)


def bench_mixes(picks: int) -> None:
    """Microseconds a token; half of each layer's picks stay from token to token."""
    trace = sticky_trace(24, 32, 4, picks)
    tokens = trace.n_rows // 24
    replayer = Replayer(trace)
    replayer.access(1)
    for share in (0.25, 0.5):
        slots = int(24 * 32 * share)
        found = interleaved(
            {name: partial(replayer.outcomes, Cell(load_policy(name), (slots,))) for name in MIXES},
            clock=time.process_time,
        )
        print(f"\n24 x 32 keys, k = 4, {slots} slots, {tokens:,} tokens, {load()}")
        for name, seconds in found.items():
            wanted = f"  (wanted: {MIXES[name]})" if MIXES[name] else ""
            print(f"  {name:<10} {seconds / tokens * 1e6:6.2f} us a token{wanted}")


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picks", type=int, default=5_000_000)
    sections = {
        "constant": lambda options: bench_constant(options.picks),
        "mixes": lambda options: bench_mixes(options.picks // 5),
    }
    run_sections(parser, sections)


if __name__ == "__main__":
    main()
