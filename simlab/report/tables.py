"""The tables of a report page as HTML: cells, best policy per size, policies, provenance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from simlab.report import text
from simlab.report.cells import Series, SeriesKey, Setting, by_concurrency, series_key
from simlab.report.verdict import best_of, moved, reference_size
from simlab.result.schema import Counters, Result

Names = dict[SeriesKey, Series]

#: A table of more sizes than this (a curve's) is closed until it is asked for.
MOST_OPEN = 16

#: Columns of numbers: heading, what it means, the value to sort by, how it is written.
_COLUMNS: tuple[tuple[str, str, Any, Any], ...] = (
    ("C", "concurrency", lambda r: r.concurrency, text.count),
    ("slots", "slots of each group", lambda r: sum(r.slots), None),
    ("share", "slots over all (layer, expert) pairs", lambda r: r.slots_share, text.percent),
    ("hit rate", "hits / lookups on the cached path", lambda r: r.hit_rate, text.percent),
    ("misses", "lookups - hits, all steps", lambda r: r.counters.misses, text.count),
    ("uploads / token", "demand uploads per decode token",
     lambda r: r.uploads_per_token, text.amount),
    ("MiB / token", "MiB moved per decode token", lambda r: r.mib_per_token, text.amount),
    ("merged runs", "runs of neighbouring uploads, each one copy per tensor",
     lambda r: r.counters.merged_runs, text.count),
    ("streamed", "misses copied, used once and dropped: the large path, or declined",
     lambda r: r.counters.streamed, text.count),
    ("CPU served", "declined misses computed by the CPU",
     lambda r: r.counters.cpu_served, text.count),
)  # fmt: skip

_MS = ("ms / token", "milliseconds per decode token: predicted or measured",
       lambda r: r.ms_per_token, text.amount)  # fmt: skip


def cells_table(rows: Sequence[Result], names: Names, table_id: str) -> str:
    """All cells; sorted and filtered by the page's script, complete without it.

    Numbers stand in ``data-v`` with full precision (empty when unknown) beside their short form.
    """
    kinds = {row.kind for row in rows}
    columns = _COLUMNS
    if any(row.ms_per_token is not None for row in rows):
        columns += (_MS,)
    heads = ['<th scope="col"><button type="button">policy</button></th>']
    if len(kinds) > 1:
        heads.append('<th scope="col"><button type="button">kind</button></th>')
    heads += [
        f'<th scope="col" class="n" title="{escape(title)}"><button type="button">{escape(name)}'
        "</button></th>"
        for name, title, _, _ in columns
    ]
    body = []
    for number, row in enumerate(rows):
        series = names[series_key(row)]
        mark = _kind_mark(row.kind) if len(kinds) > 1 else ""
        cells = [
            f'<th scope="row" data-v="{escape(series.label)}"><button type="button" class="open"'
            f' aria-expanded="false">{swatch(series)}{escape(series.label)}</button>{mark}'
            f"{_series_tag(series)}</th>"
        ]
        if len(kinds) > 1:
            cells.append(f'<td data-v="{row.kind}">{row.kind}</td>')
        for _, _, value, write in columns:
            raw = value(row)
            shown = text.slots(row.slots) if write is None else write(raw)
            cells.append(f'<td data-v="{"" if raw is None else repr(raw)}">{shown}</td>')
        body.append(
            f'<tr data-cell="{number}" data-c="{row.concurrency}" data-series="{series.index}">'
            + "".join(cells)
            + "</tr>"
        )
    return (
        f'<div class="scroll tall"><table class="cells" id="{table_id}"><thead><tr>{"".join(heads)}'
        f"</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def best_table(setting: Setting, kind: str, names: Names) -> str:
    """The always-filling policy that moves least, per size and concurrency.

    Empty unless there are two policies to choose from.
    """
    rows = [row for row in setting.rows if row.kind == kind and row.hit_rate is not None]
    if len({series_key(row) for row in rows if not row.bound}) < 2:
        return ""
    levels = sorted({row.concurrency for row in rows})
    sizes = sorted({row.slots for row in rows}, key=lambda size: (sum(size), size))
    reference = reference_size(rows)
    body = []
    for size in sizes:
        share = next(row.slots_share for row in rows if row.slots == size)
        cells = []
        for level in levels:
            at_size = [row for row in by_concurrency(rows, level) if row.slots == size]
            cells.append(f"<td>{_best_cell(at_size, names)}</td>")
        mark = ' class="ref"' if size == reference else ""
        body.append(
            f'<tr{mark}><th scope="row">{text.slots(size)}'
            f" <small>{text.percent(share)}</small></th>" + "".join(cells) + "</tr>"
        )
    heads = "".join(f'<th scope="col">concurrency {level}</th>' for level in levels)
    unit = (
        "MiB per token"
        if all(row.mib_per_token is not None for row in rows)
        else "uploads per token"
    )
    shown = " open" if len(sizes) <= MOST_OPEN else ""
    return (
        f'<details class="best"{shown}>'
        f"<summary>Fewest {unit} at each size, of the policies that fill on every miss</summary>"
        f'<div class="scroll"><table><thead><tr><th scope="col">slots</th>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></details>"
    )


def _best_cell(rows: Sequence[Result], names: Names) -> str:
    best = best_of(rows)
    if best.filling is None:
        return text.NONE
    series = names[series_key(best.filling)]
    shown = f"{swatch(series)}<b>{escape(series.label)}</b> {text.amount(moved(best.filling))}"
    if best.lru and best.filling is not best.lru and moved(best.lru) > 0:
        change = moved(best.filling) / moved(best.lru) - 1
        shown += f" <small>{text.percent(change)} against LRU</small>"
    return shown


def policies_table(rows: Iterable[Result], names: Names) -> str:
    """Name, version, hash, parameters and role of each policy."""
    firsts: dict[SeriesKey, Result] = {}
    for row in rows:
        firsts.setdefault(series_key(row), row)
    body = []
    for key in sorted(firsts, key=lambda key: names[key].index):
        row, series = firsts[key], names[key]
        params = ", ".join(f"{name} = {value:g}" for name, value in sorted(row.params.items()))
        role = "fills on every miss"
        if row.bound:
            role = "a bound: knows the future, no engine can run it"
        elif row.needs_engine_change:
            role = "declines misses: needs an engine change"
        values = (
            f"{row.policy}@{row.policy_version}",
            row.policy_hash,
            params or text.NONE,
            row.seed,
            role,
        )
        cells = "".join(f"<td>{escape(str(value))}</td>" for value in values)
        body.append(f'<tr><th scope="row">{swatch(series)}{escape(series.label)}</th>{cells}</tr>')
    heads = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("policy", "version", "hash", "parameters", "seed", "role")
    )
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def provenance_list(rows: Sequence[Result]) -> str:
    """Where the rows come from: each provenance entry with its distinct values."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, value in _flatten(row.provenance):
            found.setdefault(name, {}).setdefault(value)
        for note in row.notes:
            found.setdefault("note", {}).setdefault(note)
    items = []
    for name, values in found.items():
        shown = _span(list(values))
        lines = "<br>".join(f"<code>{escape(value)}</code>" for value in shown)
        items.append(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{lines}</dd>")
    return f"<dl>{''.join(items)}</dl>" if items else ""


#: What a cell's steps are split by, in the order shown, and the columns of ``parts_of``.
_CLASS_NAMES = {
    "<=8": "steps of up to 8 tokens",
    "9-32": "steps of 9 to 32 tokens",
    "large": "large path",
}
PART_COLUMNS = (
    "steps", "tokens", "lookups", "hit rate", "misses", "uploads", "streamed", "CPU", "MiB moved",
)  # fmt: skip


def parts_of(row: Result) -> list[list[str]]:
    """Counters of a cell by class of step and by phase, as text: name and PART_COLUMNS."""
    parts = [(_CLASS_NAMES.get(name, name), part) for name, part in row.by_class.items()]
    parts += list(row.by_phase.items())
    return [[name, *_counters(part)] for name, part in parts if part.lookups]


def _counters(part: Counters) -> list[str]:
    moved_mib = None if part.bytes_moved is None else part.bytes_moved / 2**20
    return [
        text.count(part.steps),
        text.count(part.tokens),
        text.count(part.lookups),
        text.percent(part.hit_rate),
        text.count(part.misses),
        text.count(part.demand_uploads),
        text.count(part.streamed),
        text.count(part.cpu_served),
        text.amount(moved_mib),
    ]


def _span(values: list[str]) -> list[str]:
    """Up to three values as they are; of more, the first and the last in order."""
    if len(values) <= 3:
        return values
    try:
        values.sort(key=float)
    except ValueError:
        values.sort()
    return [values[0], f"… {text.count(len(values) - 2)} more …", values[-1]]


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flatten(inner, f"{prefix}{name} ")
        elif inner is not None and inner != "":
            shown = " ".join(map(str, inner)) if isinstance(inner, list) else str(inner)
            yield f"{prefix}{name}".strip(), shown


_SHAPES = {
    "circle": '<circle cx="13" cy="7" r="3.6"/>',
    "square": '<rect x="9.6" y="3.6" width="6.8" height="6.8"/>',
    "diamond": '<path d="M13 2.2 17.8 7 13 11.8 8.2 7Z"/>',
    "triangle-up": '<path d="M13 2.4 17.4 10.4H8.6Z"/>',
    "triangle-down": '<path d="M13 11.6 8.6 3.6H17.4Z"/>',
    "cross": '<path d="M11.4 2.6h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2V8.6H8.6V5.4h2.8Z"/>',
    "pentagon": '<path d="M13 2.4 17.6 5.8 15.8 11H10.2L8.4 5.8Z"/>',
    "star": '<path d="M13 2l1.4 3.3 3.6.2-2.7 2.3.9 3.6L13 9.5l-3.2 1.9.9-3.6L8 5.5l3.6-.2Z"/>',
}


def swatch(series: Series) -> str:
    """The line and marker of a series as a small inline picture."""
    dashes = {"solid": "", "dash": ' stroke-dasharray="5 3"', "dot": ' stroke-dasharray="1.5 3"'}
    shape = "" if series.bound else _SHAPES[series.symbol]
    return (
        f'<svg class="swatch" viewBox="0 0 26 14" aria-hidden="true"'
        f' style="color:var({series.color})"><path d="M1 7H25" stroke="currentColor"'
        f' stroke-width="2"{dashes[series.dash]}/>{shape}</svg>'
    )


def _series_tag(series: Series) -> str:
    if series.bound:
        return ' <small class="tag">bound</small>'
    return ' <small class="tag">engine change</small>' if series.needs_engine_change else ""


def _kind_mark(kind: str) -> str:
    return f' <small class="tag {kind}">{kind}</small>'
