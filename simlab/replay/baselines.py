"""Engines without an adaptive cache: what a pool of the same bytes has to beat.

Each keeps a fixed set of experts on the device; a lookup of one of them is a hit, all others go the
way that the engine has for them, streamed over the link or computed on the CPU.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simlab.errors import UsageError
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell, Outcomes
from simlab.replay.kernel import DECLINED, HIT
from simlab.replay.pins import lookups_of
from simlab.replay.row import result_row
from simlab.replay.run import Replayer
from simlab.result.schema import Counters, Result

VERSION = 1
#: Name -> what it does; the way of what is not resident.
BASELINES = {
    "stream-all": ("every step copies all experts of each layer, whatever was picked", "stream"),
    "stream-picks": ("every step copies the picked experts of each layer and drops them", "stream"),
    "cpu-moe": ("all experts are computed on the CPU, as with -cmoe", "cpu"),
    "n-cpu-moe": (
        "the last layers that fit the pool's bytes are resident whole, the first are computed on"
        " the CPU, as with --n-cpu-moe and --fit",
        "cpu",
    ),
}


def parse_baselines(text: str) -> list[str]:
    """Names from ``cpu-moe,stream-picks`` or ``all``.

    Raises:
        UsageError: there is no such baseline.
    """
    names = list(BASELINES) if text == "all" else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in BASELINES:
            raise UsageError(f"there is no baseline {name!r}; there are {', '.join(BASELINES)}")
    return names


def run_baseline(
    replayer: Replayer, name: str, concurrency: int, slots: Sequence[int] = ()
) -> Result:
    """Replay one baseline.

    Args:
        slots: of each group; ``n-cpu-moe`` keeps as many whole layers as their bytes hold.

    Raises:
        UsageError: the semantics has no such engine.
    """
    if replayer.semantics not in ("llama.cpp", "sglang") or (
        replayer.pinned is not None or replayer.capacity is not None
    ):
        raise UsageError(
            "baselines are engines of their own: leave out --pin, --capacity, bmoe and per-pick"
        )
    started = time.time()
    doc, way = BASELINES[name]
    engine = copy.copy(replayer)
    engine.on_decline = way
    layers, n_expert = engine.trace.meta.moe_layers, engine.trace.meta.n_expert
    whole = _whole_layers(engine, slots) if name == "n-cpu-moe" else []
    resident = np.zeros((len(layers), n_expert), np.bool_)
    resident[whole] = True
    held = tuple(n_expert * len(set(members) & set(whole)) for members in engine.pools)
    access = engine.access(concurrency)
    outcome = np.where(lookups_of(access, resident), HIT, DECLINED).astype(np.uint8)
    cell = Cell(load_policy("lru"), held, None, concurrency)
    result = _row(engine, cell, access, outcome, started)
    notes = [f"{name}: {doc}"]
    if name == "n-cpu-moe":
        notes.append(f"n-cpu-moe: {len(layers) - len(whole)} of {len(layers)} layers on the CPU")
    if name == "stream-all":
        result = _all_bytes(engine, cell, result, started)
    return replace(
        result,
        policy=name,
        policy_version=VERSION,
        policy_hash=hashlib.sha256(f"{name}@{VERSION}".encode()).hexdigest()[:12],
        params={},
        pool="whole layers" if whole else "none",
        notes=(*result.notes, *notes),
    )


def baseline_results(
    replayer: Replayer, names: Sequence[str], cells: Sequence[Cell]
) -> list[Result]:
    """The baselines at the cells' concurrency levels; ``n-cpu-moe`` at each of their sizes."""
    results = []
    for concurrency in dict.fromkeys(cell.concurrency for cell in cells):
        for name in names:
            sizes = dict.fromkeys(cell.slots for cell in cells if cell.concurrency == concurrency)
            for slots in sizes if name == "n-cpu-moe" else [()]:
                results.append(run_baseline(replayer, name, concurrency, slots))
    return results


def _whole_layers(engine: Replayer, slots: Sequence[int]) -> list[int]:
    """Positions of the last layers whose experts fit the bytes of these slots (or their number)."""
    sizes = engine.layer_bytes or [1] * len(engine.trace.meta.moe_layers)
    room = sum(n * sizes[members[0]] for n, members in zip(slots, engine.pools, strict=True))
    kept: list[int] = []
    for position in reversed(range(len(sizes))):
        room -= sizes[position] * engine.trace.meta.n_expert
        if room < 0:
            break
        kept.append(position)
    return kept


def _row(engine: Replayer, cell: Cell, access: Any, outcome: Any, started: float) -> Result:
    found = Outcomes(
        access=access,
        outcome=outcome,
        runs=np.zeros(len(access.set_step), np.int64),
        uncached=np.zeros(len(engine.trace.meta.moe_layers), np.bool_),
        peak_bytes=None,
    )
    return result_row(engine, cell, found, started)


def _all_bytes(engine: Replayer, cell: Cell, result: Result, started: float) -> Result:
    """The result with the bytes of all experts of each (step, layer), not of the picked ones.

    They are counted as one lookup a set, of an "expert" that weighs as much as the layer.
    """
    if engine.layer_bytes is None:
        return result
    heavy = copy.copy(engine)
    heavy.layer_bytes = [size * engine.trace.meta.n_expert for size in engine.layer_bytes]
    access = engine.access(cell.concurrency)
    one = replace(
        access,
        offsets=np.arange(len(access.set_step) + 1, dtype=np.int64),
        experts=access.experts[access.offsets[:-1]],
    )
    outcome = np.full(len(one.experts), DECLINED, np.uint8)
    bytes_of = _row(heavy, cell, one, outcome, started)

    def moved(part: Counters, told: Counters) -> Counters:
        return replace(part, bytes_moved=told.bytes_moved)

    return replace(
        result,
        counters=moved(result.counters, bytes_of.counters),
        mib_per_token=bytes_of.mib_per_token,
        by_class={n: moved(part, bytes_of.by_class[n]) for n, part in result.by_class.items()},
        by_phase={n: moved(part, bytes_of.by_phase[n]) for n, part in result.by_phase.items()},
        by_layer=_with_bytes(result.by_layer, bytes_of.by_layer),
        windows=_with_bytes(result.windows, bytes_of.windows),
    )


def _with_bytes(rows: list[dict[str, Any]], told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**row, "bytes_moved": other["bytes_moved"]} for row, other in zip(rows, told, strict=True)
    ]
