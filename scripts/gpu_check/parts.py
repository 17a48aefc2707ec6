"""The parts of gpu_check: each returns ``ok``, a few ``lines`` to print, and what is worth keeping.

Each takes the device, the folder for its files, and the time.monotonic() at which all must end.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from simlab.cost.link import LinkProfile, read_profile, write_profile
from simlab.live.cells import LiveCell, Options, live_cells
from simlab.live.device import MIB, host_memory, open_device
from simlab.live.probe import SIZES, probe
from simlab.live.provenance import provenance
from simlab.live.table import cells_lines, profile_lines
from simlab.policy.registry import load_policy
from simlab.replay.grid import cells_for
from simlab.replay.run import Replayer
from simlab.replay.sizes import parse_sizes
from simlab.resources import default_trace
from simlab.result.store import write_results
from simlab.trace.importers.bmoe import load as load_bmoe
from simlab.trace.importers.options import ImportOptions
from simlab.trace.read import read_trace
from simlab.trace.schema import DECODE, Trace
from simlab.trace.synth import find_preset

COMMAND = "python3 scripts/gpu_check"
REPO = Path(__file__).resolve().parents[2]
POLICIES = ("lru", "mix", "lfu-decay")
SIZES_OF_POOL = "20%,40%,70%"
LANES = (1, 4)
#: Host memory that the expert bank may take; the whole one has 16.4 GiB.
BANK_BYTES = 8 * 2**30
#: Seconds of one run of a cell, unless less time is left.
CELL_SECONDS = 4.0


def probe_part(device_name: str, out: Path, ends: float, *, small: bool) -> dict[str, Any]:
    """The link's profile, for all sizes."""
    started = time.time()
    sizes = tuple(size for size in SIZES if size <= 4 * MIB) if small else SIZES
    with open_device(device_name) as device:
        found = probe(device, sizes=sizes, rounds=2 if small else 5)
        found = replace(found, provenance=provenance(device, COMMAND, started))
    write_profile(found, out / "link.json")
    print("\n".join(profile_lines(found)), flush=True)
    limit = "unknown" if found.limit_gb_s is None else f"{found.limit_gb_s:.1f}"
    return {
        "ok": found.valid,
        "lines": [
            f"{found.name}{f' ({found.note})' if found.note else ''}",
            f"peak {found.peak_gb_s:.2f} GB/s, limit {limit} GB/s; fitted"
            f" {found.bandwidth_gb_s:.2f} GB/s and {found.latency_us:.1f} us a copy",
            f"router ids to the host: {found.ids_wait_us:.1f} us",
            *found.problems,
        ],
    }


def live_part(device_name: str, out: Path, ends: float, *, small: bool) -> dict[str, Any]:
    """Trace in the loop: three policies and the baselines, three sizes, two concurrency levels."""
    trace, name = qwen_trace(small)
    path = out / "link.json"
    cells: list[LiveCell] = []
    with open_device(device_name) as device:
        link = read_profile(path)
        replayer = Replayer(trace, prefill="skip", trace_name=name, command=COMMAND)
        chosen = [load_policy(policy) for policy in POLICIES]
        todo = cells_for(
            replayer, chosen, sizes=parse_sizes(SIZES_OF_POOL), concurrency=list(LANES)
        )
        # one size after the other, so that a pool is made once
        todo.sort(key=lambda cell: (cell.concurrency, sum(cell.slots)))
        whole = sum(
            len(group.layers) * trace.meta.n_expert * (group.expert_bytes or 0)
            for group in replayer.layout.groups
        )
        room = min(BANK_BYTES, (host_memory() or BANK_BYTES) // 3)
        seconds = min(CELL_SECONDS, max(0.5, (ends - time.monotonic() - 60) / len(todo) / 3))
        seconds = 0.3 if small else seconds
        options = Options(
            bank_fraction=min(1.0, room / whole), seconds=seconds, repeat=1 if small else 2
        )
        failure = None
        try:
            for cell in live_cells(replayer, todo, device, link, options):
                cells.append(cell)
                if ends - time.monotonic() < 40:
                    failure = f"the time was up after {len(cells)} of {len(todo)} cells"
                    break
        finally:
            if cells:
                write_results([row for cell in cells for row in cell.rows], out / "live.json")
                print("\n".join(cells_lines(cells, link)), flush=True)
    wrong = [cell for cell in cells if cell.differences]
    lines = [f"{name} on {cells[0].measured.timing['device']}, {_note(link)}"]
    lines.append(f"{len(cells) - len(wrong)} of {len(cells)} cells equal to the simulation")
    lines += _how_good(cells)
    return {"ok": not wrong and failure is None, "lines": lines + ([failure] if failure else [])}


def _note(link: LinkProfile) -> str:
    return link.note or "real uploads"


def _how_good(cells: list[LiveCell]) -> list[str]:
    """Efficiency of the uploads and error of the predictions, with what was wanted of a GPU."""
    timing = [cell.measured.timing for cell in cells]
    efficiency = [t["upload_efficiency"] for t in timing if t["upload_efficiency"]]
    errors = [abs(t["error"]) for t in timing if not t["calibrated_on_this"]]
    planning = [t["plan_us_per_layer"] for t in timing]
    found = []
    if efficiency:
        found.append(
            f"uploads at {100 * min(efficiency):.0f} to {100 * max(efficiency):.0f} % of the"
            " probe's peak (wanted: 90 %)"
        )
    if errors:
        within = sum(error <= 0.1 for error in errors)
        found.append(
            f"predicted ms/token within 10 % in {within} of {len(errors)} cells, median error"
            f" {100 * median(errors):.1f} % (wanted: all)"
        )
    found.append(f"planning and bookkeeping {median(planning):.1f} us a layer")
    return found


def qwen_trace(small: bool) -> tuple[Trace, str]:
    """A real trace with the experts of Qwen3-30B-A3B Q4_K_M, as four requests.

    The recorded chat turn is one request; its decode tokens, in four pieces, are decoded together
    at concurrency 4. Without the file beside or in the checkout the synthetic sample is taken.
    """
    places = (REPO.parent / "shared", REPO / "shared")
    files = [place / "traces" / "bmoe" / "qwen.route.csv" for place in places]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        trace, name = read_trace(str(default_trace())), default_trace().name
    else:
        trace, name = in_pieces(load_bmoe(file, ImportOptions()), 4), "qwen.route.csv in 4 pieces"
    sizes = find_preset("qwen3-30b-a3b").expert_bytes
    if small:
        sizes = tuple(tuple(n // 64 for n in each) for each in sizes)
    meta = trace.meta.with_(expert_bytes=sizes)
    return replace(trace, meta=meta), name


def in_pieces(trace: Trace, n: int) -> Trace:
    """The decode tokens of a one-request trace as ``n`` requests."""
    kept = np.flatnonzero(trace.phase == DECODE)
    length = np.diff(trace.offsets)[kept]
    token = trace.token[kept] - trace.token[kept].min()
    piece = np.minimum(token * n // (int(token.max()) + 1), n - 1)
    return Trace(
        meta=trace.meta.with_(content_hash="", tags={}),
        request=piece.astype(np.int32),
        token=token.astype(np.int32),
        phase=trace.phase[kept],
        layer=trace.layer[kept],
        offsets=np.append(0, np.cumsum(length)).astype(np.int64),
        experts=np.concatenate(
            [trace.experts[trace.offsets[row] : trace.offsets[row + 1]] for row in kept]
        ),
    )


def capture_part(device_name: str, out: Path, ends: float, *, small: bool) -> dict[str, Any]:
    """Capture of the demo model on the device: a valid trace, and what the hooks cost."""
    import torch
    from bench_capture import compare, decode, prefill

    from simlab.capture.engine import Settings
    from simlab.capture.load import load
    from simlab.capture.prompts import demo_prompts
    from simlab.capture.run import capture

    loaded = load("demo", device=device_name.partition(":")[0])
    settings = Settings(max_new_tokens=16 if small else 64, concurrency=4)
    file = out / "captured.parquet"
    done = capture(loaded, demo_prompts(whole=False), file, settings, command=COMMAND, force=True)
    trace = read_trace(str(file))
    lines = [f"{done.meta.model} on {loaded.device_name}: {trace.n_picks:,} picks captured"]
    seconds = 1.0 if small else min(8.0, max(1.0, (ends - time.monotonic()) / 6))
    with torch.no_grad():
        for label, run in (
            ("decode, 1 sequence", decode(loaded.model, 1)),
            ("prefill, 256 tokens", prefill(loaded.model, 256)),
        ):
            plain, captured = compare(loaded.model, run, seconds).wall
            overhead = median(c / p - 1 for p, c in zip(plain, captured, strict=True))
            ms = 1e3 * median(plain)
            lines.append(f"{label}: {ms:.3f} ms a pass, with capture {100 * overhead:+.1f} %")
    same = trace.meta.content_hash == done.meta.content_hash
    return {"ok": same and not done.meta.partial, "lines": lines, "capture": done.to_dict()}
