"""Speed, as ratios within one run: medians of 5, the contenders interleaved, load average printed.

    make bench

These figures are for comparing, not for asserting: machines are shared and noisy, ratios hold.
The kernel's seconds are those of the processor, for both sides, so that other work on the machine
counts less; whole processes are timed by the clock.
Sections: the kernel against PyPI's libcachesim on the same accesses; starting `simlab replay`
again; opening a large trace; planning a layer as a live engine does. Sizes: --picks (default 10 M
accesses, 48 M picks for opening).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from simlab.analysis.stopwatch import interleaved
from simlab.live.planner import Planner
from simlab.model.layout import layout_of
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.trace.schema import DECODE, Trace, TraceMeta
from simlab.trace.write import write_trace

ROUNDS = 5


def sticky_trace(layers: int, experts: int, k: int, picks: int, seed: int = 0) -> Trace:
    """A sticky, skewed trace: each layer keeps half of its previous picks and draws the rest from a
    Zipf law over a permutation of its experts.
    """
    rng = np.random.default_rng(seed)
    tokens = picks // (layers * k)
    weights = -0.8 * np.log(np.arange(1, experts + 1))
    popularity = np.stack([rng.permutation(weights) for _ in range(layers)])
    chosen = np.empty((tokens, layers, k), np.uint16)
    noise = rng.gumbel(size=(layers, experts)).astype(np.float32)
    for token in range(tokens):
        fresh = rng.random((layers, experts), np.float32)
        redraw = fresh < 0.5
        noise[redraw] = -np.log(-np.log(fresh[redraw] * 2 + 1e-9))
        chosen[token] = np.argpartition(-(popularity + noise), k, axis=1)[:, :k]
    rows = tokens * layers
    meta = TraceMeta(
        n_expert=experts,
        k=k,
        moe_layers=tuple(range(layers)),
        model="benchmark",
        kind="synthetic",
        expert_bytes=((1 << 20,),) * layers,
    )
    return Trace(
        meta,
        np.zeros(rows, np.int32),
        np.repeat(np.arange(tokens, dtype=np.int32), layers),
        np.full(rows, DECODE, np.uint8),
        np.tile(np.arange(layers, dtype=np.int16), tokens),
        np.arange(rows + 1, dtype=np.int64) * k,
        chosen.reshape(-1),
    )


def load() -> str:
    """The machine's load average, printed beside every figure."""
    return "load average " + " ".join(f"{x:.1f}" for x in os.getloadavg())


def run_sections(
    parser: argparse.ArgumentParser, sections: dict[str, Callable[[argparse.Namespace], None]]
) -> None:
    """Run the sections named on the command line, all of them where none is."""
    parser.add_argument("sections", nargs="*", default=list(sections))
    options = parser.parse_args()
    for section in options.sections:
        if section not in sections:
            parser.error(f"no section {section}: {', '.join(sections)}")
        sections[section](options)


def bench_kernel(picks: int) -> None:
    """LRU, generic kernel, a quarter of the keys; libcachesim reads the same from a file."""
    import libcachesim

    for layers, experts, k, wanted in ((48, 128, 8, 2.5), (48, 512, 10, 4.0)):
        trace = sticky_trace(layers, experts, k, picks)
        slots = layers * experts // 4
        lru = load_policy("lru")
        whole = Replayer(trace)
        per_pick = Replayer(trace, semantics="per-pick")
        cell = Cell(lru, (slots,))
        whole.access(1), per_pick.access(1)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "accesses.oracleGeneral.bin"
            oracle_general(trace).tofile(file)

            def other(file: Path = file, slots: int = slots) -> float:
                reader = libcachesim.TraceReader(
                    str(file),
                    libcachesim.TraceType.ORACLE_GENERAL_TRACE,
                    libcachesim.ReaderInitParam(ignore_obj_size=True),
                )
                return float(libcachesim.LRU(cache_size=slots).process_trace(reader)[0])

            def ours(replayer: Replayer = per_pick, cell: Cell = cell) -> float:
                counters = replayer.outcomes(cell).outcome
                return float(np.mean(counters == 0))

            assert abs(other() - ours()) < 1e-9, "the two simulators disagree"
            found = interleaved(
                {
                    "simlab llama.cpp": lambda r=whole, c=cell: r.outcomes(c),
                    "simlab per-pick": ours,
                    "libcachesim": other,
                },
                clock=time.process_time,
            )
        n = trace.n_picks
        print(f"\nLRU, {layers} x {experts} keys, k = {k}, {slots} slots, {n:,} accesses, {load()}")
        for name, seconds in found.items():
            print(f"  {name:<18} {n / seconds / 1e6:7.1f} M/s   {seconds / n * 1e9:6.1f} ns")
        ratio = found["libcachesim"] / found["simlab per-pick"]
        print(f"  per-pick against libcachesim: {ratio:.1f} x (wanted: {wanted} x)")


def oracle_general(trace: Trace) -> npt.NDArray[np.void]:
    """The picks, experts of a row ascending, in libcachesim's binary format."""
    picks = np.sort(trace.experts.reshape(trace.n_rows, -1), axis=1).astype(np.uint64)
    keys = picks + (trace.layer.astype(np.uint64) * trace.meta.n_expert)[:, None]
    record = np.dtype(
        [("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")], align=False
    )
    rows = np.zeros(keys.size, record)
    rows["time"] = np.arange(keys.size) % 2**32
    rows["object"] = keys.reshape(-1) + np.uint64(1)
    rows["size"] = 1
    rows["next"] = -1
    return rows


def bench_start() -> None:
    """The whole process, second time: 1 M lookups through `simlab replay`."""
    trace = sticky_trace(48, 128, 8, 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.parquet"
        write_trace(trace, file)
        command = [sys.executable, "-m", "simlab", "replay", str(file), "--slots", "1536"]
        empty = {**os.environ, "SIMLAB_CACHE_DIR": str(Path(folder) / "cache")}
        empty.pop("PYTHONDONTWRITEBYTECODE", None)  # a second start finds compiled modules

        def run() -> None:
            subprocess.run(command, check=True, env=empty, stdout=subprocess.DEVNULL)

        started = time.perf_counter()
        run()
        first = time.perf_counter() - started
        again = interleaved({"again": run})["again"]
    print(f"\nsimlab replay, 1 M lookups, {load()}")
    print(f"  empty cache folder {first:.2f} s, again {again:.2f} s (wanted: < 2 s)")


def bench_open(picks: int) -> None:
    """Opening a large trace for the first time (decode, check, hash, cache) and again."""
    trace = sticky_trace(48, 128, 8, picks // 16)
    times = 16
    tokens = int(trace.token[-1]) + 1
    big = Trace(
        trace.meta,
        np.repeat(np.arange(times, dtype=np.int32), trace.n_rows),
        np.tile(trace.token, times),
        np.tile(trace.phase, times),
        np.tile(trace.layer, times),
        np.arange(trace.n_rows * times + 1, dtype=np.int64) * 8,
        np.tile(trace.experts, times),
    )
    assert tokens * 48 == trace.n_rows
    code = (
        "import sys, time; from simlab.trace.read import read_trace; t = time.perf_counter();"
        "trace = read_trace(sys.argv[1]); print(time.perf_counter() - t)"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "big.parquet"
        write_trace(big, file)
        first: list[float] = []
        again: list[float] = []
        for round_ in range(ROUNDS):
            cache = {**os.environ, "SIMLAB_CACHE_DIR": str(Path(folder) / f"cache{round_}")}
            for seconds in (first, again):
                done = subprocess.run(
                    [sys.executable, "-c", code, str(file)],
                    check=True, env=cache, capture_output=True, text=True,
                )  # fmt: skip
                seconds.append(float(done.stdout))
        megabytes = file.stat().st_size / 1e6
    n = big.n_picks
    print(f"\nOpening {n:,} picks ({megabytes:.0f} MB), {load()}")
    print(f"  first {median(first):.2f} s = {n / median(first) / 1e6:.0f} M picks/s (wanted: 60)")
    print(f"  again {median(again):.3f} s (wanted: < 0.3 s)")


def bench_live() -> None:
    """Planning one layer from Python, as a live engine does: policy, bookkeeping and the call."""
    trace = sticky_trace(48, 128, 8, 200_000)
    picks = trace.experts.astype(np.int64).reshape(-1, 48, 8)
    layout = layout_of(trace.meta)
    print(f"\nPlanning a layer, 48 x 128, k = 8, 1536 slots, {load()}")
    for name in ("lru", "fifo", "arc", "lfu", "lfu-decay", "mix"):
        times: list[float] = []
        fills = 0
        for round_ in range(ROUNDS + 1):  # the first one counts, the others are timed
            planner = Planner(load_policy(name), layout, [1536])
            counts = planner.groups[0].counts
            for step in picks:
                planner.begin_step(1)
                started = time.perf_counter()
                for layer in range(48):
                    planner.plan(layer, step[layer])
                    if not round_:
                        fills += int(counts[1])
                if round_:
                    times.append((time.perf_counter() - started) / 48 * 1e6)
        quarter, middle = np.quantile(times, (0.25, 0.5))
        print(
            f"  {name:<10} {middle:5.2f} us (first quartile {quarter:.2f}), uploads at"
            f" {fills / trace.n_picks:.0%} of the lookups (wanted: 5 us)"
        )


def bench_plan() -> None:
    """`simlab plan` on the header of a GGUF file of 100 GB (holes), the whole process."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    from gguf_files import qwen3_30b, write_gguf

    code = (
        "import sys; from simlab.cli import main; main(['plan', sys.argv[1], '--mib', '10000']);"
        # the peak of this program alone: ru_maxrss begins with that of the process it came from
        " print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "big.gguf", qwen3_30b(), vocabulary=150_000)[0]
        os.truncate(path, 10**11)
        kib: list[int] = []

        def run() -> None:
            done = subprocess.run(
                [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True
            )
            kib.append(int(done.stdout.split()[-1]))

        seconds = interleaved({"plan": run})["plan"]
    print(f"\nsimlab plan, a GGUF file of 100 GB, {load()}")
    print(f"  {seconds:.2f} s (wanted: < 0.5 s), {max(kib) / 1024:.0f} MiB (wanted: < 150)")


def main() -> None:
    """Run the sections asked for."""
    sections: dict[str, Callable[[argparse.Namespace], None]] = {
        "kernel": lambda options: bench_kernel(options.picks),
        "start": lambda options: bench_start(),
        "open": lambda options: bench_open(options.open_picks),
        "live": lambda options: bench_live(),
        "plan": lambda options: bench_plan(),
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picks", type=int, default=10_000_000)
    parser.add_argument("--open-picks", type=int, default=48_000_000)
    run_sections(parser, sections)


if __name__ == "__main__":
    main()
