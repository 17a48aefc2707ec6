"""Whole curves: many sizes of each policy, in one pass over the trace where that is exact.

LRU under ``per-pick`` and ``opt`` under ``per-pick`` and ``llama.cpp`` are stack algorithms: what a
pool holds is part of what a larger one holds, as long as the same steps pass the gate. Sizes that
part the steps alike share a pass. LRU under ``llama.cpp`` is none: resident members of a set are
touched first, so the order that a set leaves behind depends on what was resident, and so on the
size. It and all other policies are replayed once a size; access sets and schedule are shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numba
import numpy as np
import numpy.typing as npt

from simlab.policy.loader import Policy
from simlab.policy.protocol import Group
from simlab.policy.registry import load_policy
from simlab.replay.access import EVERY_PICK
from simlab.replay.cell import Cell
from simlab.replay.curve_account import CurveAccount
from simlab.replay.curve_lru import MOST_KEYS, LruLevels
from simlab.replay.curve_opt import OptLevels
from simlab.replay.grid import compile_all, side_by_side
from simlab.replay.pool import CHUNK
from simlab.replay.row import row_of
from simlab.replay.run import Replayer
from simlab.result.schema import Result

#: Rows with their parts by layer, request and window; of more rows the parts are left out.
MOST_WITH_PARTS = 1024
#: Sizes that are worth a pass of their own.
_WORTH_A_PASS = 3

Progress = Callable[[int], None] | None


@dataclass(frozen=True)
class Plan:
    """How the cells of a curve are computed.

    ``passes``: indices of the cells that share a pass; ``single``: of those replayed by themselves.
    ``why``: policy label -> how, and why so.
    """

    passes: list[list[int]]
    single: list[int]
    why: dict[str, str]

    def work(self, replayer: Replayer, cells: Sequence[Cell]) -> int:
        """Access sets that run_curve will tell its progress of."""
        alone = [cells[i] for i in self.single] + [cells[alike[0]] for alike in self.passes]
        sets = sum(len(replayer.access(cell.concurrency).set_step) for cell in alone)
        return sets * len(replayer.pools)

    def line(self) -> str:
        """One line: what was done, and why."""
        ways: dict[str, list[str]] = {}
        for label, way in self.why.items():
            ways.setdefault(way, []).append(label)
        return "; ".join(f"{', '.join(labels)}: {way}" for way, labels in ways.items())


def plan_curve(replayer: Replayer, cells: Sequence[Cell]) -> Plan:
    """Sort cells into passes and single replays."""
    curves: dict[tuple[str, str, int], list[int]] = {}
    for i, cell in enumerate(cells):
        curves.setdefault((cell.policy.label, cell.policy.hash, cell.concurrency), []).append(i)
    passes: list[list[int]] = []
    single: list[int] = []
    why: dict[str, str] = {}
    for (label, _, _), indices in curves.items():
        against = _why_not(replayer, cells[indices[0]].policy)
        if against is not None:
            why[label] = f"a replay a size{against}"
            single += indices
            continue
        alone = []
        for alike in by_gate(replayer, cells, indices):
            if len(alike) < _WORTH_A_PASS:
                alone += alike
            else:
                passes.append(alike)
        single += alone
        told = f"one pass for {len(indices) - len(alone)} sizes" if alone else "one pass"
        why[label] = told + (f", a replay each for {len(alone)} whose gate differs" * bool(alone))
    return Plan(passes, single, why)


def _why_not(replayer: Replayer, policy: Policy) -> str | None:
    """Why a policy has no exact pass here; None if it has one."""
    semantics = replayer.semantics
    if policy.name not in ("lru", "opt") or policy.hash != load_policy(policy.name).hash:
        return ""
    if policy.name == "lru" and semantics == "llama.cpp":
        return (
            " (LRU is no stack algorithm under llama.cpp: a set's hits are touched before its"
            " misses, so the order depends on the size)"
        )
    if semantics not in ("llama.cpp", "per-pick"):
        return f" (there is no pass for {semantics})"
    if replayer.pinned is not None or replayer.capacity is not None:
        return " (there is no pass beside --pin or --capacity)"
    if numba.config.DISABLE_JIT:
        return " (passes need compiled code)"
    if policy.name == "lru" and max(map(len, replayer.pools)) > (
        MOST_KEYS // replayer.trace.meta.n_expert
    ):
        return f" (a pass takes at most {MOST_KEYS:,} keys)"
    return None


def by_gate(replayer: Replayer, cells: Sequence[Cell], indices: Sequence[int]) -> list[list[int]]:
    """Cells of one curve that send the same sets down the cached path, together."""
    alike: dict[bytes, list[int]] = {}
    for i in indices:
        if min(cells[i].slots, default=1) < 1:  # a group without a slot is not a small pool
            alike[f"cell {i}".encode()] = [i]
            continue
        key = b"".join(np.packbits(part).tobytes() for part in _cached(replayer, cells[i]))
        alike.setdefault(key, []).append(i)
    return list(alike.values())


def _cached(replayer: Replayer, cell: Cell) -> list[npt.NDArray[np.bool_]]:
    """Of each pool, which access sets take the cached path: bool [sets]."""
    access = replayer.access(cell.concurrency)
    return [
        replayer.on_cached_path(access, replayer.slots_by_step(cell, number))
        for number in range(len(replayer.pools))
    ]


def run_curve(
    replayer: Replayer,
    cells: Sequence[Cell],
    plan: Plan,
    *,
    jobs: int = 1,
    progress: Progress = None,
) -> list[Result]:
    """Compute all cells on ``jobs`` threads; rows in the cells' order.

    Args:
        progress: called with the number of access sets done since the last call; a pass over a pool
            counts as one replay of it.
    """
    parts = len(cells) <= MOST_WITH_PARTS
    # the dearest first, so that no thread is left alone with one: passes, then small pools
    single = sorted(plan.single, key=lambda i: (sum(cells[i].slots), cells[i].budget_bytes or 0))
    compile_all([cells[i].policy for i in single], replayer.semantics == "bmoe", jobs)
    for concurrency in {cell.concurrency for cell in cells}:
        replayer.cycle(concurrency)
    tasks = [partial(_pass, replayer, [cells[i] for i in alike], parts) for alike in plan.passes]
    tasks += [partial(_replay, replayer, cells[i], parts) for i in single]
    order = [i for alike in plan.passes for i in alike] + single
    rows = [row for done in side_by_side(tasks, jobs, progress) for row in done]
    return [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]


def _replay(replayer: Replayer, cell: Cell, parts: bool, progress: Progress) -> list[Result]:
    row = replayer.run(cell, progress)
    if not parts:
        row = replace(row, by_layer=[], by_request=[], windows=[], notes=(*row.notes, _NO_PARTS))
    return [_told(row, "a replay")]


_NO_PARTS = (
    f"rows without their parts by layer, request and window: more than {MOST_WITH_PARTS:,} rows"
)


def _told(row: Result, path: str) -> Result:
    return replace(row, provenance={**row.provenance, "path": path})


def _pass(
    replayer: Replayer, cells: Sequence[Cell], parts: bool, progress: Progress
) -> list[Result]:
    """All sizes of one policy and concurrency whose gates agree."""
    started = time.time()
    meta, policy, concurrency = replayer.trace.meta, cells[0].policy, cells[0].concurrency
    access = replayer.access(concurrency)
    every_pick = replayer.order == EVERY_PICK
    levels = np.zeros(len(access.experts), np.uint16)
    cached = np.zeros(len(access.set_step), np.bool_)
    pool_of_layer = np.zeros(len(meta.moe_layers), np.int32)
    sizes = [np.unique([cell.slots[n] for cell in cells]) for n in range(len(replayer.pools))]
    for number, members in enumerate(replayer.pools):
        pool_of_layer[members] = number
        index_in_group = np.full(len(meta.moe_layers), -1, np.int32)
        index_in_group[members] = np.arange(len(members))
        keys = len(members) * meta.n_expert
        served = _cached(replayer, cells[0])[number]
        cached |= served & (index_in_group[access.set_layer] >= 0)
        sets = (access.set_layer, access.offsets, access.experts)
        run: LruLevels | OptLevels
        if policy.name == "lru":
            run = LruLevels(*sets, index_in_group, meta.n_expert, keys, sizes[number], levels)
        else:
            group = Group(
                len(members), meta.n_expert, keys, 0, meta.k, len(access.experts), replayer.seed
            )
            needed = replayer.needs.of(policy, access, concurrency, index_in_group, group, served)
            run = OptLevels(
                *sets, needed.next_use, served, index_in_group, meta.n_expert, keys, every_pick,
                sizes[number], levels,
            )  # fmt: skip
        for first in range(0, len(access.set_step), CHUNK):
            until = min(first + CHUNK, len(access.set_step))
            run.run(first, until)
            if progress is not None:
                progress(until - first)
    counted = CurveAccount(
        replayer.trace, access, levels, cached, pool_of_layer, max(map(len, sizes)) + 1
    )
    path = f"one pass for {len(cells)} sizes"
    results = []
    for cell in cells:
        level_of_pool = [
            int(np.searchsorted(of_pool, n)) for of_pool, n in zip(sizes, cell.slots, strict=True)
        ]
        found = counted.of(
            level_of_pool, replayer.layer_bytes, on_decline=replayer.on_decline, parts=parts
        )
        row = row_of(replayer, cell, access, found, started)
        notes = row.notes if parts else (*row.notes, _NO_PARTS)
        if not every_pick:
            notes = (*notes, "merged runs are not known from one pass")
        results.append(_told(replace(row, notes=notes), path))
    return results
