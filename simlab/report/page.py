"""One self-contained HTML page from result rows: nothing is loaded from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from simlab.errors import UsageError
from simlab.report import figures, tables, text, timing
from simlab.report.cells import (
    Series,
    Setting,
    assign_series,
    by_concurrency,
    group_settings,
    is_time_only,
    series_key,
)
from simlab.report.verdict import Names, Verdict, agreement, reference_size, verdicts
from simlab.result.schema import Result

#: Charts of a setting: key, heading, how to read it.
_CHARTS = (
    (
        "frontier",
        "Hit rate against MiB moved",
        "Up and left is better; larger marks are larger caches, ringed ones the size that the"
        " verdict quotes.",
    ),
    ("hits", "Hit rate against slots", "Higher is better."),
    ("bytes", "MiB moved per token against slots", "Lower is better."),
)
#: What the first chart shows, by who serves a declined miss.
_ONE_LINE = {
    "cpu": "Policies that fill on every miss share one line, because each miss costs one upload:"
    " the better one is further up it with the same slots. A policy that declines misses leaves"
    " that line, at the price of work for the CPU.",
    "stream": "All policies share about one line, because each miss costs one copy, also a declined"
    " one: the better one is further up it with the same slots.",
}


def render_page(rows: Sequence[Result], title: str | None = None) -> str:
    """The report on all rows as one HTML document.

    Args:
        rows: cells of any traces, settings and kinds.
        title: heading of the page; by default it names the traces.

    Raises:
        UsageError: there are no rows.
    """
    if not rows:
        raise UsageError("the result files hold no rows; run simlab replay --out first")
    names = assign_series(rows)
    settings = group_settings(rows)
    found = [verdicts(setting, names) for setting in settings]
    heading = title or "Expert cache policies on " + text.join(
        list(dict.fromkeys(row.trace_name for row in rows))[:3]
    )
    data = {
        "settings": [_payload(setting, names) for setting in settings],
        "partColumns": tables.PART_COLUMNS,
    }
    # "<" must not appear in a script block: a name like "</script>" would end it
    payload = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    body = [_banner(rows)]
    if len(settings) > 1:
        body.append(_overview(settings, found))
    for number, setting in enumerate(settings):
        body.append(_section(number, setting, found[number], names, len(settings) > 1))
    body += [_how_to_read(settings), _provenance(rows, settings, names)]
    return _DOCUMENT.format(
        title=escape(heading),
        style=_asset("style.css"),
        body="\n".join(body),
        data=payload,
        plotly=_plotly(),
        script=_asset("page.js"),
    )


# default-src 'none': the browser itself refuses any load, whatever a script or a name asks for
_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<noscript><p class="banner">The charts need JavaScript; the tables do not.</p></noscript>
<script type="application/json" id="data">{data}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def _banner(rows: Sequence[Result]) -> str:
    kinds = {row.kind for row in rows}
    lines = []
    if "simulated" in kinds:
        what = "here" if kinds == {"simulated"} else "marked simulated"
        lines.append(
            '<p class="banner sim"><b>SIMULATED</b> Router picks were replayed through a cache;'
            f" nothing {what} was timed on a GPU.</p>"
        )
    if "predicted" in kinds:
        lines.append(
            '<p class="banner sim"><b>PREDICTED</b> What is marked predicted comes from a model of'
            " time.</p>"
        )
    if "measured" in kinds:
        lines.append(
            '<p class="banner sim"><b>MEASURED</b> What is marked measured ran on'
            f" {escape(timing.places(rows))}.</p>"
        )
    if any(row.synthetic for row in rows):
        which = "The picks" if all(row.synthetic for row in rows) else "Some of the picks"
        lines.append(
            f'<p class="banner synth"><b>SYNTHETIC TRACE</b> {which} were generated, not routed by'
            " a model: they show how policies behave, not what your model would do.</p>"
        )
    return "".join(lines)


def _overview(settings: Sequence[Setting], found: Sequence[Sequence[Verdict]]) -> str:
    items = [
        f'<li><a href="#s{number}">{escape(setting.first.trace_name)}</a>'
        f"{_synthetic_tag(setting)} <small>{escape(setting.describe())}</small>"
        + "".join(f"<p>{_lead(verdict, setting)}</p>" for verdict in found[number])
        + "</li>"
        for number, setting in enumerate(settings)
    ]
    leads = f'<ul class="leads">{"".join(items)}</ul>'
    return f'<section class="verdict"><h2>Verdict</h2>{leads}</section>'


def _section(
    number: int, setting: Setting, found: Sequence[Verdict], names: Names, several: bool
) -> str:
    first = setting.first
    levels = setting.concurrency
    rows = _table_order(setting, names)
    head = (
        f"<h2>{escape(first.trace_name)}{_synthetic_tag(setting)}</h2>" if several else ""
    ) + f'<p class="setting">{escape(first.model)} · {escape(setting.describe())}</p>'
    title = "" if several else "<h2>Verdict</h2>"
    parts = [head, *(_verdict_box(verdict, setting, names, title) for verdict in found)]
    said = [*agreement(setting), *timing.sentences(setting, names)]
    parts += [f'<p class="agree">{escape(sentence)}</p>' for sentence in said]
    parts.append(_controls(levels, setting, names))
    charts = (*_CHARTS, *timing.CHARTS) if timing.has_times(setting) else _CHARTS
    parts.append(
        f'<div class="charts">{"".join(_chart(setting, *chart) for chart in charts)}</div>'
    )
    parts.append(timing.measured_table(setting, names))
    if any(row.by_layer for row in rows):
        parts.append(_heatmap(setting))
    parts.append(
        f"<h3>All {text.count(len(rows))} cells</h3>"
        f"{_filters(levels, rows, names)}"
        '<p class="hint">Click a heading to sort, a policy for its counters by class of step.</p>'
        + tables.cells_table(rows, names, f"cells{number}")
        + '<div class="parts" aria-live="polite" hidden></div>'
    )
    body = "".join(parts)
    return f'<section class="setting-block" id="s{number}" data-setting="{number}">{body}</section>'


def _verdict_box(verdict: Verdict, setting: Setting, names: Names, heading: str) -> str:
    levels = "".join(
        f"<li><b>Concurrency {level}</b><div>"
        + "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
        + "</div></li>"
        for level, sentences in verdict.levels
    )
    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in verdict.notes)
    return (
        f'<div class="verdict">{heading}<p class="lead">{_lead(verdict, setting)}</p>'
        + (f"<ul>{levels}</ul>" if levels else "")
        + notes
        + tables.best_table(setting, verdict.kind, names)
        + "</div>"
    )


def _lead(verdict: Verdict, setting: Setting) -> str:
    kind = f"{verdict.kind.capitalize()}: " if len(setting.kinds) > 1 else ""
    return escape(kind + verdict.lead)


def _controls(levels: Sequence[int], setting: Setting, names: Names) -> str:
    buttons = "".join(
        f'<button type="button" data-level="{level}"'
        f' aria-pressed="{str(level == levels[0]).lower()}">{level}</button>'
        for level in levels
    )
    shown = {names[series_key(row)].index: names[series_key(row)] for row in setting.rows}
    legend = "".join(
        f'<button type="button" data-series="{index}" aria-pressed="true">{tables.swatch(series)}'
        f"{escape(series.label)}{_role(series)}</button>"
        for index, series in sorted(shown.items())
    )
    kinds = ""
    if len(setting.kinds) > 1:
        kinds = (
            '<p class="hint">Filled marks are simulated, open ones measured, open ones with a dot'
            " predicted.</p>"
        )
    return (
        '<div class="controls"><div class="levels" role="group" aria-label="Concurrency">'
        f"<span>Concurrency</span>{buttons}</div>"
        f'<div class="legend" role="group" aria-label="Policies shown">{legend}</div>{kinds}</div>'
    )


def _role(series: Series) -> str:
    if series.bound:
        return " <small>bound</small>"
    return " <small>needs an engine change</small>" if series.needs_engine_change else ""


def _origin(setting: Setting, timed: bool = False) -> str:
    """Kinds, trace and rules of the figures: the line under every chart's heading.

    Args:
        timed: the figures are times; predicted rows show nowhere else.
    """
    shown = [
        r for r in setting.rows if (r.ms_per_token is not None if timed else not is_time_only(r))
    ]
    kinds = " and ".join(kind.upper() for kind in Setting(tuple(shown)).kinds)
    trace = "synthetic" if setting.first.synthetic else "real"
    return (
        f'<p class="sub">{kinds}, {trace} trace · {escape(setting.describe())}'
        ' · <span class="at"></span></p>'
    )


def _chart(setting: Setting, key: str, heading: str, reading: str) -> str:
    alt = f"{heading}, one line a policy. The table of cells below holds every figure."
    if key == "frontier":
        reading += " " + _ONE_LINE.get(setting.first.on_decline, "")
    timed = key in (chart[0] for chart in timing.CHARTS)
    return (
        f'<figure class="{key}"><h3>{heading}</h3>{_origin(setting, timed)}'
        f'<div class="plot" data-chart="{key}" role="img" aria-label="{escape(alt)}"></div>'
        f"<figcaption>{reading}</figcaption></figure>"
    )


def _heatmap(setting: Setting) -> str:
    sizes: dict[str, Result] = {}
    for row in sorted(setting.rows, key=lambda row: (sum(row.slots), row.slots)):
        if row.by_layer:
            sizes.setdefault(_size_id(row), row)
    reference = reference_size(list(sizes.values()))
    options = "".join(
        f'<option value="{size}"{" selected" if row.slots == reference else ""}>'
        f"{text.slots(row.slots)} slots ({text.percent(row.slots_share)})</option>"
        for size, row in sizes.items()
    )
    return (
        f'<figure class="heat"><h3>Hit rate by layer</h3>{_origin(setting)}'
        f'<label>at <select class="size">{options}</select></label>'
        '<div class="plot" data-chart="heat" role="img" aria-label="Hit rate of each policy in each'
        ' layer at the chosen size."></div>'
        "<figcaption>Hits over lookups of all steps, per layer of the model.</figcaption></figure>"
    )


def _filters(levels: Sequence[int], rows: Sequence[Result], names: Names) -> str:
    shown = {names[series_key(row)].index: names[series_key(row)].label for row in rows}
    by_level = "".join(f'<option value="{level}">{level}</option>' for level in levels)
    by_policy = "".join(
        f'<option value="{i}">{escape(s)}</option>' for i, s in sorted(shown.items())
    )
    selects = "".join(
        f'<label>{name} <select data-by="{by}"><option value="">all</option>{options}</select>'
        "</label>"
        for name, by, options in (("concurrency", "c", by_level), ("policy", "series", by_policy))
    )
    return f'<div class="filters">{selects}</div>'


def _how_to_read(settings: Sequence[Setting]) -> str:
    engine = ""
    if any(setting.first.semantics == "llama.cpp" for setting in settings):
        engine = (
            "llama.cpp itself ships LRU. The other policies that fill on every miss would replace"
            " its choice of victim; those that decline misses need a change of the engine."
        )
    return f"""<section class="words"><h2>Words</h2>
<p>A <b>lookup</b> is one distinct expert of one layer in one step; a <b>slot</b> holds one expert.
A <b>hit</b> finds its expert in a slot; every other lookup is a <b>miss</b>, which uploads the
expert into a slot, or is <b>declined</b>: streamed (copied, used once, dropped) or computed by the
CPU. Hit rates are over the steps that the cache serves; MiB per token are over decode tokens. The
<b>cycle T</b> is the number of distinct experts, over all layers of a group, that one step touches.
Below the <b>cliff</b> LRU evicts what the next layers need and hits almost nothing. <b>Bounds</b>
know the future: opt bounds every policy that always fills, opt-bypass every policy. {engine}</p>
</section>"""


def _provenance(rows: Sequence[Result], settings: Sequence[Setting], names: Names) -> str:
    items = []
    for setting in settings:
        first = setting.first
        layers = len({part["layer"] for part in first.by_layer})
        shape = f"{layers} layers, " if layers else ""
        lanes = ", ".join(
            f"{level} (mean {by_concurrency(setting.rows, level)[0].busy_lanes:.2f} busy)"
            for level in setting.concurrency
        )
        seeds = text.join(sorted({str(row.seed) for row in setting.rows}))
        entries = (
            ("trace", f"{first.trace_name} ({'synthetic' if first.synthetic else 'real'} picks)"),
            ("trace hash", first.trace_hash),
            ("model", first.model),
            (
                "layout hash",
                f"{first.layout_hash} ({shape}{text.count(first.n_keys)} experts in all)",
            ),
            ("semantics", setting.describe()),
            ("concurrency", lanes),
            ("seed", seeds),
            ("kind of figures", text.join(setting.kinds)),
        )
        items.append(
            "<dl>"
            + "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in entries)
            + "</dl>"
        )
    return (
        '<section class="provenance"><h2>Provenance</h2>'
        f"{''.join(items)}{tables.provenance_list(rows)}"
        f"<h3>Policies</h3>{tables.policies_table(rows, names)}</section>"
    )


def _payload(setting: Setting, names: Names) -> dict[str, Any]:
    """What the page's script draws from: figures per concurrency, and parts of each cell."""
    rows = _table_order(setting, names)
    levels = {
        str(level): {
            "frontier": figures.frontier(setting, level, names),
            "hits": figures.against_slots(setting, level, names, "hit_rate"),
            "bytes": figures.against_slots(setting, level, names, "mib_per_token"),
            "time": figures.against_slots(setting, level, names, "ms_per_token"),
            "residuals": figures.residuals(setting, level, names),
            "at": _busy(setting, level),
        }
        for level in setting.concurrency
    }
    cells = [
        {
            "title": f"{names[series_key(row)].label}, {text.slots(row.slots)} slots, concurrency"
            f" {row.concurrency}, {row.kind}",
            "series": names[series_key(row)].index,
            "label": names[series_key(row)].label
            + ("" if row.kind == "simulated" else f" ({row.kind})"),
            "level": row.concurrency,
            "size": _size_id(row),
            "layers": []
            if is_time_only(row)
            else [[part["layer"], _layer_rate(part)] for part in row.by_layer],
            "parts": tables.parts_of(row),
        }
        for row in rows
    ]
    no_bytes = all(row.mib_per_token is None for row in setting.rows)
    reason = (
        "The trace does not say how large an expert is, so MiB cannot be drawn."
        if no_bytes
        else "No cell at this concurrency has these figures."
    )
    return {"levels": levels, "cells": cells, "empty": reason}


def _table_order(setting: Setting, names: Names) -> list[Result]:
    """The rows as the table lists them; the script's cells are in the same order."""
    return sorted(
        setting.rows,
        key=lambda row: (row.concurrency, sum(row.slots), names[series_key(row)].index, row.kind),
    )


def _busy(setting: Setting, level: int) -> str:
    busy = by_concurrency(setting.rows, level)[0].busy_lanes
    mean = f" (mean {busy:.1f} streams busy)" if level > 1 else ""
    return f"concurrency {level}{mean}"


def _size_id(row: Result) -> str:
    return "-".join(map(str, row.slots))


def _layer_rate(part: dict[str, Any]) -> float | None:
    return round(part["hits"] / part["lookups"], 4) if part["lookups"] else None


def _synthetic_tag(setting: Setting) -> str:
    return ' <small class="tag synth">synthetic trace</small>' if setting.first.synthetic else ""


@cache
def _asset(name: str) -> str:
    return resources.files("simlab.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    # the library names tile servers and its home page, none of which a report uses; "\/" is the
    # same character to JavaScript, and leaves no address in the file for anyone to wonder about
    source: str = get_plotlyjs()
    return source.replace("://", ":\\/\\/")
