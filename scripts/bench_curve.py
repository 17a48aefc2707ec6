"""Whole curves: speed of the passes, and what many policies at many sizes cost.

    python scripts/bench_curve.py [passes] [grid] [threads] [--picks N]

Medians of 5, the contenders interleaved, load average printed; the grid is run once. `passes`: LRU
at every size and `opt` at 64 sizes against a single replay of the same policy at a quarter of the
keys, in seconds of the processor, so that other work on the machine counts less. `grid`: the whole
command, 8 policies x 64 sizes, CPU seconds and peak memory. `threads`: the same on two threads
against one, fewer sizes. `make bench` runs all of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from bench import load, run_sections, sticky_trace

from simlab.analysis.stopwatch import interleaved
from simlab.policy.loader import Policy
from simlab.policy.protocol import Group
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.curve import plan_curve, run_curve
from simlab.replay.curve_lru import LruLevels
from simlab.replay.curve_opt import OptLevels
from simlab.replay.grid import compile_all
from simlab.replay.run import Replayer
from simlab.trace.schema import Trace
from simlab.trace.write import write_trace

POLICIES = "lru,fifo,clock,sieve,slru,s3fifo,arc,opt"
SIZES = 64


def bench_passes(picks: int) -> None:
    """The kernels that find levels, on the accesses alone, as the single replays beside them."""
    for layers, experts, k in ((48, 128, 8), (48, 512, 10)):
        trace = sticky_trace(layers, experts, k, picks)
        print(f"\nPasses, {layers} x {experts} keys, k = {k}, {trace.n_picks:,} picks, {load()}")
        for semantics in ("per-pick", "llama.cpp"):
            found = _passes(trace, semantics)
            for name, seconds in found.items():
                wanted = {"lru, one pass": " (wanted: 150)", "opt, one pass": " (wanted: 15)"}
                print(
                    f"  {semantics:<10} {name:<14} {trace.n_picks / seconds / 1e6:7.1f} M lookups/s"
                    f"{wanted.get(name, '')}"
                )
            for name in ("lru", "opt"):
                if f"{name}, one pass" in found:
                    ratio = found[f"{name}, one pass"] / found[f"{name}, single"]
                    print(f"  {semantics:<10} {name}: a pass is {ratio:.2f} single replays")


def _passes(trace: Trace, semantics: str) -> dict[str, float]:
    """Median seconds of each pass, and of a single replay beside it."""
    replayer = Replayer(trace, semantics=semantics)
    access = replayer.access(1)
    layers, experts = len(trace.meta.moe_layers), trace.meta.n_expert
    keys, n_sets = layers * experts, len(access.set_layer)
    index = np.arange(layers, dtype=np.int32)
    sizes = np.unique(np.linspace(keys / SIZES, keys, SIZES).astype(np.int64))
    every = np.arange(1, keys + 1)
    sets = (access.set_layer, access.offsets, access.experts)
    levels = np.zeros(len(access.experts), np.uint16)
    served = np.ones(n_sets, np.bool_)
    group = Group(layers, experts, keys, 0, trace.meta.k, len(access.experts), 0)
    opt, lru = load_policy("opt"), load_policy("lru")
    future = replayer.needs.of(opt, access, 1, index, group, served).next_use
    per_pick = semantics == "per-pick"

    def lru_pass() -> None:
        LruLevels(*sets, index, experts, keys, every, levels).run(0, n_sets)

    def opt_pass() -> None:
        one = OptLevels(*sets, future, served, index, experts, keys, per_pick, sizes, levels)
        one.run(0, n_sets)

    def single(policy: Policy) -> None:
        replayer.outcomes(Cell(policy, (keys // 4,)))

    contenders = {"opt, one pass": opt_pass, "opt, single": lambda: single(opt)}
    if per_pick:
        contenders |= {"lru, one pass": lru_pass, "lru, single": lambda: single(lru)}
    return interleaved(contenders, clock=time.process_time)


def bench_grid(picks: int) -> None:
    """`simlab curve`, the whole process, policies compiled before."""
    trace = sticky_trace(48, 128, 8, picks)
    code = (
        "import resource, sys; from simlab.cli import main; code = main(sys.argv[1:]);"
        "used = resource.getrusage(resource.RUSAGE_SELF);"
        # the peak of this program alone: ru_maxrss begins with that of the process it came from
        "peak = open('/proc/self/status').read().split('VmHWM:')[1].split()[0];"
        "print(used.ru_utime + used.ru_stime, peak, file=sys.stderr); sys.exit(code)"
    )
    compile_all([load_policy(name) for name in POLICIES.split(",")], False, 2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.parquet"
        write_trace(trace, file)
        out = str(Path(folder) / "curve.parquet")
        command = [sys.executable, "-c", code, "curve", str(file), "--policy", POLICIES]
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--sizes", str(SIZES), "--out", out],
            check=True, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        wall = time.perf_counter() - started
    cpu, peak = done.stderr.split()[-2:]
    arrays = (trace.request, trace.token, trace.phase, trace.layer, trace.offsets, trace.experts)
    decoded = sum(array.nbytes for array in arrays)
    budget = 500 + 3 * decoded / 1e6
    print(f"\n{POLICIES} x {SIZES} sizes x {trace.n_picks:,} lookups, llama.cpp, {load()}")
    print(f"  {float(cpu):.0f} CPU-seconds in {wall:.0f} s (wanted at 5 M lookups: 150)")
    print(
        f"  peak {int(peak) * 1024 / 1e6:.0f} MB; the decoded trace has {decoded / 1e6:.0f} MB"
        f" (wanted: {budget:.0f})"
    )


def bench_threads(picks: int) -> None:
    """Two threads against one, on the cells alone."""
    replayer = Replayer(sticky_trace(48, 128, 8, picks))
    cells = [
        Cell(load_policy(name), (48 * 128 * n // 8,))
        for name in ("lru", "fifo", "clock", "sieve")
        for n in range(1, 9)
    ]
    plan = plan_curve(replayer, cells)
    found = interleaved(
        {
            str(jobs): lambda jobs=jobs: run_curve(replayer, cells, plan, jobs=jobs)
            for jobs in (1, 2)
        }
    )
    print(f"\nOne thread and two, {len(cells)} cells of {picks:,} lookups, {load()}")
    print(
        f"  {found['1']:.2f} s and {found['2']:.2f} s: {found['1'] / found['2']:.2f} x (wanted:"
        f" 1.7 x where the machine is free; {os.cpu_count()} CPUs)"
    )


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picks", type=int, default=5_000_000)
    sections = {
        "passes": lambda options: bench_passes(options.picks),
        "grid": lambda options: bench_grid(options.picks),
        "threads": lambda options: bench_threads(options.picks),
    }
    run_sections(parser, sections)


if __name__ == "__main__":
    main()
