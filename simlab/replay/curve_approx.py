"""A quick curve: some sizes are replayed, the others interpolated, and the error is measured.

Of each curve that has no exact pass, sizes spread evenly are replayed, then in rounds as many again
where the hit rate rises or bends most; between them everything is linear in slots. Some more sizes,
drawn at random, are replayed too and take no part: how far the interpolation is off there is the
error that is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np

from simlab.errors import UsageError
from simlab.replay.cell import Cell
from simlab.replay.curve import Plan, Progress, by_gate, run_curve
from simlab.replay.row import room_of
from simlab.replay.run import Replayer
from simlab.result.schema import Counters, Result

#: Fewest sizes that are worth it; most sizes that are spread evenly, and most that are held out.
LEAST_SIZES = 16
_MOST_EVEN = 16
_MOST_HELD_OUT = 8
_ROUNDS = 4


def run_approx(
    replayer: Replayer,
    cells: Sequence[Cell],
    plan: Plan,
    *,
    jobs: int = 1,
    progress: Progress = None,
) -> tuple[list[Result], list[str]]:
    """Rows in the cells' order, and a line a curve that tells its error.

    Rows of passes and of replayed sizes are exact; interpolated ones say so in a note, and hold no
    parts.

    Raises:
        UsageError: a curve has fewer than LEAST_SIZES sizes to replay.
    """
    rows: dict[int, Result] = {}

    def run(wanted: Sequence[int], passes: Sequence[Sequence[int]] = ()) -> None:
        place = {i: n for n, i in enumerate(wanted)}
        shared = [[place[i] for i in alike] for alike in passes]
        single = [] if passes else list(place.values())
        part = replace(plan, passes=shared, single=single)
        done = run_curve(replayer, [cells[i] for i in wanted], part, jobs=jobs, progress=progress)
        rows.update(zip(wanted, done, strict=True))

    curves = _curves(replayer, cells, plan)
    held = {key: _held_out(replayer.seed, indices) for key, indices in curves.items()}
    first: dict[_Key, list[int]] = {}
    for key, indices in curves.items():
        left = [i for i in indices if i not in held[key]]
        count = min(len(left) // 8 + 2, _MOST_EVEN)
        picked = np.unique(np.linspace(0, len(left) - 1, count).round().astype(int))
        first[key] = [left[n] for n in picked]
    in_passes = [i for alike in plan.passes for i in alike]
    in_curves = {i for indices in curves.values() for i in indices}
    if in_passes:
        run(in_passes, plan.passes)
    few = [i for i in plan.single if i not in in_curves]
    run(few + [i for chosen in first.values() for i in chosen])
    for number in range(_ROUNDS):
        wanted = [i for indices in held.values() for i in indices] if number == 0 else []
        for key, indices in curves.items():
            left = [i for i in indices if i not in held[key]]
            wanted += _where_it_bends(cells, rows, left, -(-len(first[key]) // _ROUNDS))
        run(wanted)

    told = []
    for key, indices in curves.items():
        anchors = [i for i in indices if i in rows and i not in held[key]]
        guesses = {
            i: _between(replayer, cells[i], cells, rows, anchors)
            for i in indices
            if i not in anchors
        }
        points, moved = _errors([(guesses[i], rows[i]) for i in held[key]])
        what = "uploads" if rows[anchors[0]].mib_per_token is None else "MiB"
        line = (
            f"{len(anchors) + len(held[key])} of {len(indices)} sizes replayed, the others"
            f" interpolated; largest error at {len(held[key])} held-out sizes: {100 * points:.2f}"
            f" points of hit rate, {moved:,.2f} {what}/token"
        )
        cell = cells[indices[0]]
        told.append(f"APPROXIMATE: {cell.policy.label}, C = {cell.concurrency}: {line}")
        for i, guess in guesses.items():
            if i not in rows:
                rows[i] = replace(guess, notes=(*guess.notes, f"APPROXIMATE: interpolated; {line}"))
    return [rows[i] for i in range(len(cells))], told


#: Policy, concurrency and gate: what a curve is drawn for.
_Key = tuple[str, int, int]


def _curves(replayer: Replayer, cells: Sequence[Cell], plan: Plan) -> dict[_Key, list[int]]:
    """The cells to interpolate, smallest first: a curve ends where other steps pass the gate.

    Raises:
        UsageError: a policy has too few sizes.
    """
    policies: dict[tuple[str, int], list[int]] = {}
    for i in plan.single:
        policies.setdefault((cells[i].policy.hash, cells[i].concurrency), []).append(i)
    passed = {(cells[i].policy.hash, cells[i].concurrency) for alike in plan.passes for i in alike}
    curves: dict[_Key, list[int]] = {}
    for (policy, concurrency), indices in policies.items():
        parts = [part for part in by_gate(replayer, cells, indices) if len(part) >= LEAST_SIZES]
        if not parts and (policy, concurrency) not in passed:
            raise UsageError(
                f"--approx needs at least {LEAST_SIZES} sizes at which the same steps pass the"
                " gate: ask for more sizes, or leave it out, and all are replayed"
            )
        for number, part in enumerate(parts):
            curves[policy, concurrency, number] = sorted(part, key=lambda i: _room(cells[i]))
    return curves


def _held_out(seed: int, indices: Sequence[int]) -> list[int]:
    """Sizes that only tell the error, never an end."""
    count = min(max(3, len(indices) // 12), _MOST_HELD_OUT)
    return sorted(Random(seed).sample(indices[1:-1], count))


def _room(cell: Cell) -> int:
    """What a curve is drawn over: slots of all groups (``bmoe``: bytes)."""
    return cell.budget_bytes or sum(cell.slots)


def _where_it_bends(
    cells: Sequence[Cell], rows: dict[int, Result], curve: Sequence[int], count: int
) -> list[int]:
    """The middle sizes of the stretches where a straight line may be farthest off.

    Args:
        curve: its cells, smallest first; those in ``rows`` are replayed, the two ends among them.
    """
    places = [n for n, i in enumerate(curve) if i in rows]
    x = np.array([_room(cells[curve[n]]) for n in places], float)
    y = np.array([rows[curve[n]].hit_rate or 0.0 for n in places])
    width = np.maximum(np.diff(x), 1)
    slope = np.diff(y) / width
    bend = np.abs(np.diff(slope, prepend=slope[:1], append=slope[-1:]))
    # a smooth curve is off by its bend; any that never falls, by no more than its rise
    off = (np.maximum(bend[:-1], bend[1:]) * width + np.abs(np.diff(y))) * (np.diff(places) > 1)
    order = [n for n in np.argsort(-off, kind="stable") if off[n] > 0]
    return [curve[(places[n] + places[n + 1]) // 2] for n in order[:count]]


def _between(
    replayer: Replayer,
    cell: Cell,
    cells: Sequence[Cell],
    rows: dict[int, Result],
    anchors: Sequence[int],
) -> Result:
    """A row between its neighbours among the anchors; the ends are anchors."""
    beyond = (n for n, i in enumerate(anchors) if _room(cells[i]) > _room(cell))
    n = next(beyond, len(anchors) - 1)
    below, above = anchors[n - 1], anchors[n]
    low, high = rows[below], rows[above]
    near = _room(cells[below])
    weight = (_room(cell) - near) / max(1, _room(cells[above]) - near)

    def mid(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + weight * (b - a)

    def whole(name: str) -> int:
        value = mid(getattr(low.counters, name), getattr(high.counters, name))
        assert value is not None
        return round(value)

    a = low.counters
    served = {name: whole(name) for name in ("demand_uploads", "streamed", "cpu_served")}
    misses = sum(served.values())
    moved = mid(a.bytes_moved, high.counters.bytes_moved)
    slots, share, capacity_bytes = room_of(replayer, cell)
    return replace(
        low,
        slots=slots,
        slots_share=share,
        capacity_bytes=capacity_bytes,
        counters=Counters(
            steps=a.steps,
            tokens=a.tokens,
            lookups=a.lookups,
            hits=a.lookups - misses,
            misses=misses,
            **served,
            merged_runs=None,
            bytes_moved=None if moved is None else round(moved),
            picks=a.picks,
            pick_hits=whole("pick_hits"),
        ),
        hit_rate=mid(low.hit_rate, high.hit_rate),
        pick_hit_rate=mid(low.pick_hit_rate, high.pick_hit_rate),
        mib_per_token=mid(low.mib_per_token, high.mib_per_token),
        uploads_per_token=mid(low.uploads_per_token, high.uploads_per_token),
        peak_bytes=None,
        by_class={},
        by_phase={},
        by_layer=[],
        by_request=[],
        windows=[],
        notes=cell.notes,
        provenance={
            **low.provenance,
            "path": f"interpolated between {near} and {_room(cells[above])}",
        },
    )


def _errors(pairs: Sequence[tuple[Result, Result]]) -> tuple[float, float]:
    """Largest differences: of the hit rates, and of the MiB (or uploads) moved per token."""
    points = moved = 0.0
    for guess, true in pairs:
        points = max(points, abs((guess.hit_rate or 0.0) - (true.hit_rate or 0.0)))
        moved = max(moved, abs(_moved(guess) - _moved(true)))
    return points, moved


def _moved(row: Result) -> float:
    return (row.uploads_per_token if row.mib_per_token is None else row.mib_per_token) or 0.0
