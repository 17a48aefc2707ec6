"""Plotly figures of one setting at one concurrency, as plain dictionaries.

Colours are names of CSS variables, ``var(--c0)``; the page's script puts in their values for the
present colour scheme. Every text that comes from a file is escaped, since plotly reads markup.
``legendgroup`` carries the series index, by which the page's legend shows and hides lines.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from simlab.report import text, timing
from simlab.report.cells import (
    Series,
    SeriesKey,
    Setting,
    by_concurrency,
    is_time_only,
    series_key,
    size_label,
)
from simlab.report.verdict import reference_size
from simlab.result.schema import Result

Figure = dict[str, Any]

_TITLES = {
    "hit_rate": "hit rate",
    "mib_per_token": "MiB moved per token",
    "ms_per_token": "ms per token",
}


def frontier(setting: Setting, level: int, names: dict[SeriesKey, Series]) -> Figure | None:
    """Hit rate against MiB moved per token, a line a policy; None without any point."""
    lines = _lines(setting, level, names, ("mib_per_token", "hit_rate"))
    if not lines:
        return None
    reference = reference_size(setting.rows)
    for line in lines:
        rows, series = line.pop("rows"), line.pop("series")
        line["mode"] = "markers" if rows[0].kind == "measured" else "lines+markers"
        line["x"] = [row.mib_per_token for row in rows]
        line["y"] = [row.hit_rate for row in rows]
        line["text"] = [_hover(row, series) for row in rows]
        base = 6 if rows[0].kind == "simulated" else 11
        line["marker"]["size"] = [base + 8 * min(row.slots_share, 1.0) ** 0.5 for row in rows]
        if rows[0].kind == "simulated":  # ring the points at the size that the verdict quotes
            line["marker"]["line"] = {
                "color": "var(--ink)",
                "width": [2 if row.slots == reference else 0 for row in rows],
            }
    layout = _layout(setting, "closest")
    layout["xaxis"].update(
        title={"text": "MiB moved per token"}, range=[0, _top(setting, "mib_per_token")]
    )
    layout["yaxis"].update(title={"text": "hit rate"}, tickformat=".0%", range=[-0.02, 1.04])
    return {"data": lines, "layout": layout}


def against_slots(
    setting: Setting, level: int, names: dict[SeriesKey, Series], metric: str
) -> Figure | None:
    """``hit_rate``, ``mib_per_token`` or ``ms_per_token`` against slots, the cliff marked; None
    without any point.
    """
    lines = _lines(setting, level, names, (metric,))
    if not lines:
        return None
    write = text.percent if metric == "hit_rate" else text.amount
    title = _TITLES[metric]
    for line in lines:
        rows, series = line.pop("rows"), line.pop("series")
        label = html.escape(series.label) + (
            "" if rows[0].kind == "simulated" else f" ({rows[0].kind})"
        )
        line["x"] = [row.slots_share for row in rows]
        line["y"] = [getattr(row, metric) for row in rows]
        line["text"] = [f"{label} <b>{write(getattr(row, metric))}</b>" for row in rows]
        if metric == "ms_per_token" and rows[0].kind == "measured":
            line["error_y"] = {**timing.error_bars(rows), "color": line["marker"]["color"]}
    layout = _layout(setting, "x unified")
    end = 1.03 * max(row.slots_share for row in setting.rows)
    full, unit = _slots_axis(setting)
    layout["xaxis"].update(title={"text": f"{unit}, share of the experts"}, range=[0, end])
    layout["xaxis"]["hoverformat"] = ".1%"
    layout["xaxis"]["unifiedhovertitle"] = {"text": "%{x:.1%} of the experts"}
    layout["hoversort"] = "value descending"
    layout["meta"] = {"full": full}  # the script labels ticks with slots and share
    if metric == "hit_rate":
        layout["yaxis"].update(title={"text": title}, tickformat=".0%", range=[-0.02, 1.04])
    else:
        layout["yaxis"].update(title={"text": title}, range=[0, _top(setting, metric)])
    cliff = _cliff(by_concurrency(setting.rows, level))
    if cliff and cliff[0]["x0"] <= end:
        layout.update(shapes=cliff[:-1], annotations=[cliff[-1]])
    return {"data": lines, "layout": layout}


def residuals(setting: Setting, level: int, names: dict[SeriesKey, Series]) -> Figure | None:
    """Error of the predicted time against slots, a mark a measured cell; None without any."""
    lines = _lines(setting, level, names, ("ms_per_token",))
    lines = [line for line in lines if line["rows"][0].kind == "measured"]
    shown = []
    for line in lines:
        rows, series = line.pop("rows"), line.pop("series")
        found = [(row.slots_share, timing.error_of(row)) for row in rows]
        found = [(share, error) for share, error in found if error is not None]
        if not found:
            continue
        line["x"], line["y"] = (list(values) for values in zip(*found, strict=True))
        label = html.escape(series.label)
        line["text"] = [
            f"{label} (predicted / measured) <b>{error:+.1%}</b>" for error in line["y"]
        ]
        shown.append(line)
    if not shown:
        return None
    layout = _layout(setting, "x unified")
    full, unit = _slots_axis(setting)
    end = 1.03 * max(row.slots_share for row in setting.rows)
    layout["xaxis"].update(title={"text": f"{unit}, share of the experts"}, range=[0, end])
    layout["xaxis"]["hoverformat"] = ".1%"
    layout["xaxis"]["unifiedhovertitle"] = {"text": "%{x:.1%} of the experts"}
    layout["meta"] = {"full": full}
    errors = [error for row in setting.rows if (error := timing.error_of(row)) is not None]
    reach = 1.15 * max(0.1, *map(abs, errors))
    layout["yaxis"].update(
        title={"text": "predicted / measured, less 1"}, tickformat="+.0%", range=[-reach, reach],
        zeroline=True, zerolinecolor="var(--axis)",
    )  # fmt: skip
    return {"data": shown, "layout": layout}


def _lines(
    setting: Setting, level: int, names: dict[SeriesKey, Series], metrics: Sequence[str]
) -> list[dict[str, Any]]:
    """One trace a (series, kind) with its usable rows; the caller fills x, y and text."""
    groups: dict[tuple[int, str], list[Result]] = {}
    for row in by_concurrency(setting.rows, level):
        if is_time_only(row) and "ms_per_token" not in metrics:
            continue
        if all(getattr(row, metric) is not None for metric in metrics):
            groups.setdefault((names[series_key(row)].index, row.kind), []).append(row)
    # bounds first: the lines of real policies are drawn over them
    order = sorted(groups, key=lambda key: (not groups[key][0].bound, -key[0]))
    lines = []
    for key in order:
        rows = groups[key]
        series = names[series_key(rows[0])]
        color = f"var({series.color})"
        symbol, mode, dash = series.symbol, "lines+markers", series.dash
        if rows[0].kind == "measured":
            symbol, mode = f"{symbol}-open", "markers"
        elif rows[0].kind == "predicted":
            symbol, dash = f"{symbol}-open-dot", "dashdot"
        lines.append(
            {
                "type": "scatter",
                "mode": "lines" if series.bound and len(rows) > 1 else mode,
                "name": html.escape(series.label),
                "legendgroup": str(series.index),
                "line": {
                    "color": color,
                    "width": 2 if series.bound else 3 if key[0] == 0 else 1.8,
                    "dash": dash,
                },
                "marker": {
                    "color": color,
                    "opacity": 1,
                    "symbol": symbol,
                    "size": 7 if rows[0].kind == "simulated" else 11,
                    "line": {"color": color, "width": 0 if rows[0].kind == "simulated" else 2},
                },
                "hovertemplate": "%{text}<extra></extra>",
                "rows": rows,
                "series": series,
            }
        )
    return lines


def _hover(row: Result, series: Series) -> str:
    uploads = f"{text.amount(row.uploads_per_token)} uploads per token"
    lines = [
        f"<b>{html.escape(series.label)}</b> · {row.kind}",
        size_label(row),
        f"hit rate {text.percent(row.hit_rate)}",
        f"{text.amount(row.mib_per_token)} MiB, {uploads}",
    ]
    if row.needs_engine_change:
        lines.append("needs an engine change")
    return "<br>".join(lines)


def _layout(setting: Setting, hovermode: str) -> dict[str, Any]:
    axis = {
        "gridcolor": "var(--grid)",
        "linecolor": "var(--axis)",
        "zeroline": False,
        "tickfont": {"size": 12},
        "automargin": True,
        "separatethousands": True,
    }
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "var(--ink-2)", "size": 12.5},
        "separators": "." + text.THIN,
        "showlegend": False,
        "hovermode": hovermode,
        "hoverlabel": {
            "bgcolor": "var(--panel)",
            "bordercolor": "var(--axis)",
            "font": {"color": "var(--ink)", "size": 12.5},
            "align": "left",
        },
        "margin": {"l": 8, "r": 12, "t": 30, "b": 8},
        "xaxis": {
            **axis,
            "showgrid": False,
            "showline": True,
            "ticks": "outside",
            "showspikes": False,
        },
        "yaxis": {**axis, "showgrid": True},
    }


def _top(setting: Setting, metric: str) -> float:
    """The same upper end at every concurrency, so that switching shows what concurrency does."""
    values = [getattr(row, metric) for row in setting.rows]
    return 1.05 * max((value for value in values if value is not None), default=1.0) or 1.0


def _slots_axis(setting: Setting) -> tuple[float, str]:
    """Slots that a share of 1 stands for, and their name: per group where groups have as many."""
    first = setting.first
    groups = len(first.slots)
    if groups > 1 and all(len(set(row.slots)) == 1 for row in setting.rows):
        return first.n_keys / groups, "slots per group"
    return float(first.n_keys), "slots" if groups == 1 else "slots of all groups"


def _cliff(rows: Sequence[Result]) -> list[dict[str, Any]] | None:
    """Shapes of the cliff (first) and of the cycle T, then their label; None when not known."""
    row = next((row for row in rows if row.cliff_slots > 0 and row.cliff_share > 0), None)
    if row is None:
        return None
    keys = row.cliff_slots / row.cliff_share
    low, mid, high = (
        int(row.cycle.get(name, row.cliff_slots)) for name in ("min", "median", "max")
    )
    shapes = [_line(row.cliff_share, "dash")]
    if high > low:
        shapes.append(
            {
                "type": "rect", "xref": "x", "yref": "paper", "x0": low / keys, "x1": high / keys,
                "y0": 0, "y1": 1, "fillcolor": "var(--cliff)", "opacity": 0.1, "line": {"width": 0},
                "layer": "below",
            }
        )  # fmt: skip
        cycle = f"T {text.count(low)}–{text.count(high)}, median {text.count(mid)}"
    else:
        shapes.append(_line(mid / keys, "dot"))
        cycle = f"T {text.count(mid)}"
    label = {
        "x": 0, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom",
        "showarrow": False, "text": f"┆ cliff {text.count(row.cliff_slots)} · cycle {cycle}",
        "font": {"color": "var(--cliff)", "size": 12},
    }  # fmt: skip
    return [*shapes, label]


def _line(x: float, dash: str) -> dict[str, Any]:
    return {
        "type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1,
        "line": {"color": "var(--cliff)", "width": 1.5, "dash": dash}, "layer": "below",
    }  # fmt: skip
