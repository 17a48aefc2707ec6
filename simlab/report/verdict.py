"""The verdict: sentences computed from the rows of one setting, and the best policy per size.

Rules, so that a verdict cannot be picked to please:

- Figures are quoted at one *reference size*, the one nearest to 25 % of the experts among the sizes
  that most cells share; the table of best policies covers every size.
- Policies that decline misses can always move less by declining more, and no engine runs them
  unchanged, so they compete apart: the one that moves least at a hit rate not below LRU's.
- "Moves less" is MiB per token; uploads per token where the expert bytes are unknown.
- Simulated, predicted and measured rows never share a sentence, except the one on how they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simlab.report import text
from simlab.report.cells import (
    Series,
    SeriesKey,
    Setting,
    by_concurrency,
    is_time_only,
    series_key,
    size_label,
)
from simlab.result.schema import Result

REFERENCE_SHARE = 0.25
BASELINE = "lru"

Names = dict[SeriesKey, Series]


@dataclass(frozen=True)
class Best:
    """The policies worth naming in one (size, concurrency).

    Attributes:
        lru: the baseline's row, if it was run.
        filling: of the policies that fill on every miss, the one that moves least (LRU on a tie).
        sharpest: the filling policy with the highest hit rate, when that is another one.
        declining: of the policies that decline, the one that moves least at no lower hit rate than
            LRU (than ``filling`` without LRU); else the one with the highest hit rate.
        bound: the ``opt`` row, else any bound's.
        rivals: how many executable policies were run.
    """

    lru: Result | None
    filling: Result | None
    sharpest: Result | None
    declining: Result | None
    bound: Result | None
    rivals: int


def moved(row: Result) -> float:
    """What a policy is judged by: MiB per token, uploads per token without bytes, else misses."""
    if row.mib_per_token is not None:
        return row.mib_per_token
    return float(row.counters.misses) if row.uploads_per_token is None else row.uploads_per_token


def best_of(rows: Sequence[Result]) -> Best:
    """The policies worth naming among the cells of one size, concurrency and kind."""
    usable = [row for row in rows if row.hit_rate is not None]
    runs = [row for row in usable if not row.bound]
    lru = next((row for row in runs if row.policy == BASELINE), None)
    fills = [row for row in runs if not row.needs_engine_change]
    filling = min(fills, key=lambda row: (moved(row), row.policy != BASELINE), default=None)
    sharpest = max(fills, key=_rate, default=None)
    if filling is None or sharpest is None or _rate(sharpest) <= _rate(filling):
        sharpest = None
    declines = [row for row in runs if row.needs_engine_change]
    floor = lru or filling
    at_par = [row for row in declines if floor is None or _rate(row) >= _rate(floor)]
    declining = min(at_par, key=moved, default=max(declines, key=_rate, default=None))
    bounds = [row for row in usable if row.bound]
    bound = min(bounds, key=lambda row: row.policy != "opt", default=None)
    return Best(lru, filling, sharpest, declining, bound, len({series_key(row) for row in runs}))


def reference_size(rows: Sequence[Result]) -> tuple[int, ...] | None:
    """The size that the verdict quotes; None when no cell has a hit rate."""
    cells: dict[tuple[int, ...], set[object]] = {}
    share: dict[tuple[int, ...], float] = {}
    for row in rows:
        if row.hit_rate is not None:
            cells.setdefault(row.slots, set()).add((row.concurrency, series_key(row)))
            share[row.slots] = row.slots_share
    if not cells:
        return None
    most = max(len(found) for found in cells.values())
    shared = [size for size, found in cells.items() if len(found) == most]
    return min(shared, key=lambda size: (abs(share[size] - REFERENCE_SHARE), size))


@dataclass(frozen=True)
class Verdict:
    """What the cells of one kind say.

    Attributes:
        kind: simulated, predicted or measured.
        lead: the answer in one sentence, at the reference size.
        levels: (concurrency, sentences with the figures behind the lead).
        notes: what else a reader must know before believing the lead.
    """

    kind: str
    lead: str
    levels: tuple[tuple[int, tuple[str, ...]], ...] = ()
    notes: tuple[str, ...] = ()


def verdicts(setting: Setting, names: Names) -> list[Verdict]:
    """One Verdict a kind of row in the setting.

    Args:
        setting: the cells to judge.
        names: Series by series_key, for the policies' labels.
    """
    found = []
    for kind in setting.kinds:
        rows = Setting(
            tuple(row for row in setting.rows if row.kind == kind and not is_time_only(row))
        )
        if rows.rows:
            found.append(_verdict(rows, names))
    return found


def _verdict(setting: Setting, names: Names) -> Verdict:
    kind = setting.first.kind
    size = reference_size(setting.rows)
    if size is None:
        lead = (
            "No step of any cell took the cached path, so there is nothing to compare: give the"
            " cache more slots than the experts that one step needs."
        )
        return Verdict(kind, lead)
    at_size = [row for row in setting.rows if row.slots == size]
    bests = [(level, best_of(by_concurrency(at_size, level))) for level in setting.concurrency]
    bests = [(level, best) for level, best in bests if best.rivals or best.bound]
    declined = setting.first.on_decline
    levels = tuple((level, tuple(_level(best, names, declined))) for level, best in bests)
    place = f"At {size_label(at_size[0])} "
    return Verdict(kind, place + _lead(bests, names) + ".", levels, tuple(_notes(setting, size)))


def _lead(bests: Sequence[tuple[int, Best]], names: Names) -> str:
    """Who moves least, at which concurrency, against LRU; or why that cannot be said."""
    runs = [(level, best) for level, best in bests if best.rivals]
    if not runs:
        return "there are only bounds, which no engine can run"
    fills = [(level, best, best.filling) for level, best in runs if best.filling]
    if not fills:
        return "every policy declines misses, so each needs an engine change"
    if all(best.rivals == 1 for _, best in runs):
        alone = _upper(names[series_key(fills[0][2])].label)
        rates = [f"{text.percent(row.hit_rate)}{_at(level)}" for level, _, row in fills]
        return f"{alone} hits {text.join(rates)}; no other policy was run, so this compares nothing"
    places: dict[str, list[str]] = {}
    for level, best, row in fills:
        label = names[series_key(row)].label
        if best.lru is None:
            claim, against = f"{label} moves the least", ""
        elif moved(row) < moved(best.lru):
            claim = f"{label} moves the fewest {_unit(row)}"
            against = f" ({text.less_than(moved(row), moved(best.lru))} LRU)"
        else:
            claim, against = (
                f"no policy that fills on every miss moves less than {_upper(label)}",
                "",
            )
        places.setdefault(claim, []).append(f"{level}{against}")
    clauses = [f"{claim} at concurrency {text.join(where)}" for claim, where in places.items()]
    if all(best.lru is None for _, best in runs):
        clauses.append("lru was not run, so there is no baseline")
    return "; ".join(clauses)


def _level(best: Best, names: Names, on_decline: str) -> list[str]:
    """The figures of one concurrency at the reference size."""
    sentences: list[str] = []
    base = best.lru or best.filling
    if best.filling:
        figures = f"{_upper(names[series_key(best.filling)].label)}: {_figures(best.filling)}"
        if best.lru and best.filling is not best.lru:
            figures += f"; LRU{_cliff(best.lru)}: {_figures(best.lru)}"
        if best.sharpest:
            label = names[series_key(best.sharpest)].label
            figures += f"; highest hit rate: {label}, {text.percent(best.sharpest.hit_rate)}"
        sentences.append(figures + ".")
    if best.bound:
        sentences.append(_headroom(best, base, names))
    if best.declining:
        sentences.append(_declining(best.declining, base, names, on_decline))
    return sentences


def _headroom(best: Best, base: Result | None, names: Names) -> str:
    """How far LRU, or else the best policy, is from the bound, and how much of it is closed."""
    assert best.bound is not None
    bound, top = names[series_key(best.bound)].label, text.percent(best.bound.hit_rate)
    if base is None:
        return f"The {bound} bound: {_figures(best.bound)}."
    label = names[series_key(base)].label
    gap = _rate(best.bound) - _rate(base)
    if gap < 0.0005:
        return f"{_upper(label)} is at the {bound} bound ({top})."
    sentence = (
        f"{_upper(label)} leaves {text.points(gap)} points of hit rate to the {bound} bound ({top})"
    )
    closer = best.sharpest or best.filling
    if best.lru and closer and _rate(closer) > _rate(base):
        closed = text.points(_rate(closer) - _rate(base))
        sentence += f"; {names[series_key(closer)].label} closes {closed} of them"
    return sentence + "."


def _declining(row: Result, base: Result | None, names: Names, on_decline: str) -> str:
    """What a policy that declines misses would do, named as needing an engine change."""
    sentence = f"With an engine change, {names[series_key(row)].label}: {_figures(row)}"
    if base:
        label = _upper(names[series_key(base)].label)
        sentence += f" ({text.less_than(moved(row), moved(base))} {label}"
        sentence += ", at a lower hit rate)" if _rate(row) < _rate(base) else ")"
    served = "the CPU computes" if on_decline == "cpu" else "the engine copies and drops"
    return f"{sentence}; {served} the misses it declines."


def _notes(setting: Setting, reference: tuple[int, ...]) -> list[str]:
    """What limits the lead: missing bounds, other sizes, unknown bytes, inflated accounting."""
    notes = _other_sizes(setting, reference)
    row = setting.first
    if not any(row.bound for row in setting.rows):
        notes.append("No bound was run, so the room left for a better policy is unknown.")
    if any(row.mib_per_token is None for row in setting.rows):
        notes.append("The bytes of an expert are unknown, so policies are ranked without MiB.")
    if row.semantics == "per-pick" and setting.concurrency[-1] > 1:
        notes.append(
            "per-pick counts every pick as a lookup: at concurrency above 1 that inflates hit rates"
            " by tens of points against what an engine sees."
        )
    if row.semantics == "sglang":
        notes.append("The sglang semantics are a model of SGLang, not checked against it.")
    return notes


def _other_sizes(setting: Setting, reference: tuple[int, ...]) -> list[str]:
    """Whether the other sizes tell the same story: where LRU is not beaten."""
    kept = beaten = 0
    for level in setting.concurrency:
        rows = by_concurrency(setting.rows, level)
        for size in {row.slots for row in rows} - {reference}:
            best = best_of([row for row in rows if row.slots == size])
            if best.lru is None or best.filling is None or best.rivals < 2:
                continue
            if moved(best.filling) < moved(best.lru):
                beaten += 1
            else:
                kept += 1
    pairs = kept + beaten
    if not pairs:
        return []
    where = "other pair" if pairs == 1 else f"{pairs} other pairs"
    if not kept:
        return [
            f"In the {where} of size and concurrency too, an always-filling policy moves less"
            " than LRU."
        ]
    if not beaten:
        return [
            f"In the {where} of size and concurrency, no always-filling policy moves less than LRU."
        ]
    return [
        f"Of the {where} of size and concurrency, LRU is beaten by an always-filling policy in"
        f" {beaten} and not beaten in {kept}."
    ]


def agreement(setting: Setting) -> list[str]:
    """How far predicted and measured cells are from the simulated ones of the same identity."""
    simulated = {_identity(row): row for row in setting.rows if row.kind == "simulated"}
    sentences = []
    for kind in ("predicted", "measured"):
        gaps = [
            abs(_rate(row) - _rate(simulated[_identity(row)]))
            for row in setting.rows
            if row.kind == kind and row.hit_rate is not None and not is_time_only(row)
            if _identity(row) in simulated and simulated[_identity(row)].hit_rate is not None
        ]
        if gaps:
            cells = "cell" if len(gaps) == 1 else "cells"
            sentences.append(
                f"In {text.count(len(gaps))} {kind} {cells} the hit rate is within"
                f" {100 * max(gaps):.2f} points of the simulated one."
            )
    return sentences


def _identity(row: Result) -> tuple[object, ...]:
    return (series_key(row), row.concurrency, row.slots)


def _rate(row: Result) -> float:
    return -1.0 if row.hit_rate is None else row.hit_rate


def _cliff(row: Result) -> str:
    if row.slots_share >= row.cliff_share:
        return ""
    return f" (below its cliff of {text.count(row.cliff_slots)} slots)"


def _figures(row: Result) -> str:
    return f"{text.amount(moved(row))} {_unit(row)}, hit rate {text.percent(row.hit_rate)}"


def _unit(row: Result) -> str:
    if row.mib_per_token is not None:
        return "MiB per token"
    return "misses" if row.uploads_per_token is None else "uploads per token"


def _at(level: int) -> str:
    return f" at concurrency {level}"


def _upper(label: str) -> str:
    """A policy's name in a sentence: LRU as the articles write it."""
    return "LRU" if label == BASELINE else label
