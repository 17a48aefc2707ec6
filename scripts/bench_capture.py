"""What capturing costs: tokens a second with hooks and trace writing, beside the plain model.

    python scripts/bench_capture.py [--seconds 40] [--threads 1]

The demo model, or its shape with random weights where it is not installed (the cost does not
depend on the weights). Plain and captured forward passes of one run take turns, in changing order,
over the same tokens. Overhead is the median over the rounds of (captured / plain - 1), with its
quartiles, in wall-clock time; and the same in the main thread's processor time, which other jobs
on the machine disturb less. A captured pass is timed with its hooks, taking the picks as an array
and handing them to the trace. "own" is the share of a pass that the last two take; "writer" the
share of one core that the thread takes which writes the trace.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

from simlab.capture.engine import StepRows
from simlab.capture.hooks import Tap, attach
from simlab.capture.spool import Spool
from simlab.trace.schema import TraceMeta
from simlab.trace.write import TraceWriter


def load() -> tuple[Any, str]:
    """The model and its name."""
    folder = Path(__file__).resolve().parents[1] / "simlab" / "capture" / "demo_model"
    if (folder / "model.safetensors").is_file():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), "tiny demo model"
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=32,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=128,
        num_experts_per_tok=8,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config), "random weights, 12 layers x 128 experts, 8 picks"


class Capturing:
    """Takes the picks after each pass and hands their rows to the trace; positions run on."""

    tap: Tap

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.token = 0

    def after(self) -> None:
        """Of one forward pass."""
        experts = self.tap.take().experts()
        token = np.arange(self.token, self.token + len(experts), dtype=np.int32)
        self.token += len(token)
        request, phase = np.zeros_like(token), np.ones(len(token), np.uint8)
        self.spool.put(StepRows(0, request, token, phase, experts, None))


def finish(model: Any) -> None:
    """Wait for a GPU, which works on after the call has returned."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def decode(model: Any, batch: int) -> Callable[[], int]:
    """A forward pass of one token a sequence, after 64 tokens; tokens computed."""
    cache = DynamicCache(config=model.config)
    ids = torch.randint(3, model.config.vocab_size, (batch, 64), device=model.device)
    model(ids, past_key_values=cache, use_cache=True)

    def run() -> int:
        model(ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        finish(model)
        return batch

    return run


def prefill(model: Any, tokens: int) -> Callable[[], int]:
    """A forward pass over a text; tokens computed."""
    text = torch.randint(3, model.config.vocab_size, (1, tokens), device=model.device)

    def run() -> int:
        model(text, use_cache=False, logits_to_keep=1)
        finish(model)
        return tokens

    return run


@dataclass
class Times:
    """Seconds of each pass by the wall clock and of the main thread, plain and captured."""

    wall: tuple[list[float], list[float]]
    cpu: tuple[list[float], list[float]]
    own: list[float]  # of it, taking the picks and handing them over
    tokens: int
    writer: float  # share of a core that the writing thread took


def compare(model: Any, run: Callable[[], int], seconds: float) -> Times:
    """Passes in turns for so many seconds."""
    times = Times(([], []), ([], []), [], run(), 0.0)

    def clock(which: int, after: Callable[[], None]) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        run()
        ran = time.thread_time()
        after()
        if which:
            times.own.append(time.thread_time() - ran)
        times.wall[which].append(time.perf_counter() - wall)
        times.cpu[which].append(time.thread_time() - cpu)

    with tempfile.TemporaryDirectory() as folder:
        with attach(model) as tap:
            sites = list(tap.sites)
            meta = TraceMeta(tap.n_expert, tap.k, tap.moe_layers, kind="captured")
        with (
            TraceWriter(Path(folder) / "bench.parquet", meta) as writer,
            Spool(writer, meta.moe_layers, step=False) as spool,
        ):
            thread = next(t for t in threading.enumerate() if t.name == "simlab trace")
            assert thread.ident is not None
            capturing = Capturing(spool)
            started = time.perf_counter()
            while time.perf_counter() - started < seconds:
                order = (0, 1) if len(times.wall[0]) % 2 else (1, 0)
                for which in order:
                    # both do the same before the clock runs, and find the caches alike
                    capturing.tap = Tap(model, sites, False)
                    if which:
                        clock(1, capturing.after)
                    capturing.tap.close()
                    if not which:
                        clock(0, lambda: None)
            spent = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            times.writer = spent / (time.perf_counter() - started)
    return times


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40, help="for each kind of work")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # older names of arguments
    torch.set_num_threads(options.threads)
    model, name = load()
    model.eval()
    load_average = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(
        f"{name}; torch {torch.__version__}, CPU, {options.threads} thread(s); load {load_average}"
    )
    print(
        "work                   rounds  tok/s: plain, captured  wall (quartiles), cpu, own, writer"
    )
    with torch.no_grad():
        for label, run in (
            ("decode, 1 sequence", decode(model, 1)),
            ("decode, 8 sequences", decode(model, 8)),
            ("prefill, 256 tokens", prefill(model, 256)),
        ):
            times = compare(model, run, options.seconds)
            plain, captured = times.wall
            wall, cpu = (
                [c / p - 1 for p, c in zip(*both, strict=True)] for both in (times.wall, times.cpu)
            )
            low, _, high = quantiles(wall, n=4)
            own = median(o / c for o, c in zip(times.own, times.cpu[1], strict=True))
            print(
                f"{label:<22}{len(plain):>7}{times.tokens / median(plain):>12.1f}"
                f"{times.tokens / median(captured):>10.1f}     {median(wall):+.1%}"
                f" ({low:+.1%}, {high:+.1%}), {median(cpu):+.1%}, {own:.1%}, {times.writer:.1%}"
            )


if __name__ == "__main__":
    main()
