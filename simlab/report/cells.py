"""Sorting cells into what may be compared, and giving each policy one name and one look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simlab.report import text
from simlab.result.schema import KINDS, Result

#: Identity of one line of a chart; the kind is drawn differently, not named differently.
SeriesKey = tuple[str, int, str, tuple[tuple[str, float], ...], int]

COLORS = 10
SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "cross",
    "pentagon",
    "star",
)


@dataclass(frozen=True)
class Setting:
    """Cells of one trace under one semantics, decline rule, prefill rule and schedule.

    Only their policies, sizes, concurrency and kinds differ, so their figures may be compared.
    """

    rows: tuple[Result, ...]

    @property
    def first(self) -> Result:
        """A row to read the shared fields from."""
        return self.rows[0]

    @property
    def concurrency(self) -> list[int]:
        """Concurrency levels, ascending."""
        return sorted({row.concurrency for row in self.rows})

    @property
    def kinds(self) -> list[str]:
        """Kinds of the rows, in the order of KINDS."""
        return [kind for kind in KINDS if any(row.kind == kind for row in self.rows)]

    def describe(self) -> str:
        """What decides the figures and must stand beside each of them."""
        row = self.first
        model = " (a model of SGLang, not checked against it)" if row.semantics == "sglang" else ""
        return (
            f"{row.semantics} semantics{model} · {row.pool} pool · on decline: {row.on_decline}"
            f" · prefill: {row.prefill} · schedule: {row.schedule}"
        )


@dataclass(frozen=True)
class Series:
    """The name and the look of one policy, the same all over a page.

    ``color`` names a CSS variable; ``dash`` is plotly's word, also read by the style sheet.
    """

    index: int
    label: str
    color: str
    symbol: str
    dash: str
    bound: bool
    needs_engine_change: bool


def is_time_only(row: Result) -> bool:
    """A predicted row whose counters are the simulated row's: only its time is its own."""
    return row.kind == "predicted" and row.ms_per_token is not None


def series_key(row: Result) -> SeriesKey:
    """What makes two cells points of the same line."""
    params = tuple(sorted(row.params.items()))
    return (row.policy, row.policy_version, row.policy_hash, params, row.seed)


def group_settings(rows: Iterable[Result]) -> list[Setting]:
    """Settings in the order of their first rows; a row given twice counts once."""
    groups: dict[tuple[object, ...], dict[object, Result]] = {}
    for row in rows:
        key = (
            row.trace_hash, row.layout_hash, row.n_keys, row.semantics, row.pool, row.on_decline,
            row.prefill, row.schedule, row.ubatch,
        )  # fmt: skip
        cell = (row.kind, series_key(row), row.concurrency, row.slots, row.counters)
        groups.setdefault(key, {}).setdefault(cell, row)
    return [Setting(tuple(group.values())) for group in groups.values()]


def by_concurrency(rows: Iterable[Result], concurrency: int) -> list[Result]:
    """The rows of one concurrency, smallest caches first."""
    found = [row for row in rows if row.concurrency == concurrency]
    return sorted(found, key=lambda row: (sum(row.slots), row.slots))


def assign_series(rows: Sequence[Result]) -> dict[SeriesKey, Series]:
    """One Series a policy: lru first, then in order of appearance, the bounds last.

    Policies that appear with several versions, parameters or seeds are told apart by those.
    """
    firsts: dict[SeriesKey, Result] = {}
    for row in rows:
        firsts.setdefault(series_key(row), row)
    ordered = sorted(firsts, key=lambda key: (firsts[key].bound, firsts[key].policy != "lru"))
    series: dict[SeriesKey, Series] = {}
    for index, key in enumerate(ordered):
        row = firsts[key]
        rivals = [other for other in ordered if other[0] == key[0]]
        dash = "solid"
        if row.bound:
            dash = "dot" if "bypass" in row.policy else "dash"
        series[key] = Series(
            index=index,
            label=_label(row, rivals),
            color="--bound" if row.bound else f"--c{index % COLORS}",
            symbol=SYMBOLS[(index + index // COLORS) % len(SYMBOLS)],
            dash=dash,
            bound=row.bound,
            needs_engine_change=row.needs_engine_change,
        )
    return series


def _label(row: Result, rivals: list[SeriesKey]) -> str:
    """The policy's name, with as much of version, parameters, seed and hash as rivals demand."""
    label = row.policy
    versions, hashes, params, seeds = ({rival[i] for rival in rivals} for i in (1, 2, 3, 4))
    if len(versions) > 1:
        label += f"@{row.policy_version}"
    if len(params) > 1:
        given = ", ".join(f"{name}={value:g}" for name, value in sorted(row.params.items()))
        label += f" ({given or 'defaults'})"
    if len(seeds) > 1:
        label += f" seed {row.seed}"
    if len(hashes) > 1 and len(versions) == 1:
        label += f" #{row.policy_hash[:6]}"
    return label


def size_label(row: Result) -> str:
    """Slots and share of one cell, as verdicts and hover texts name it."""
    groups = len(row.slots)
    if groups > 1 and len(set(row.slots)) == 1:
        slots = f"{text.count(row.slots[0])} slots in each of {groups} groups"
    else:
        slots = f"{text.slots(row.slots)} slots"
    return f"{slots} ({text.percent(row.slots_share)} of the experts)"
