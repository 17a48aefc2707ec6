"""Milliseconds: measured points on predicted curves, how far apart they are, what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from simlab.report import text
from simlab.report.cells import Series, SeriesKey, Setting, by_concurrency, series_key
from simlab.report.verdict import reference_size
from simlab.result.schema import Result

Names = dict[SeriesKey, Series]

#: Charts of a setting with times: key, heading, how to read it.
CHARTS = (
    (
        "time",
        "Milliseconds per token against slots",
        "Lower is better. Lines with dotted open marks are predicted; open marks without a line are"
        " measured, with the range over the repeats.",
    ),
    (
        "residuals",
        "Error of the prediction",
        "Predicted over measured milliseconds per token, less 1. A cell that the prediction was"
        " calibrated on is left out.",
    ),
)


def has_times(setting: Setting) -> bool:
    """Whether any cell was timed or has a predicted time."""
    return any(row.ms_per_token is not None for row in setting.rows)


def number(row: Result, *path: str) -> float | None:
    """A number out of a row's timing; None where there is none."""
    value: Any = row.timing
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if ok else None


def error_of(row: Result) -> float | None:
    """Predicted over measured, less 1; None without a prediction, or where it was calibrated."""
    if row.kind != "measured" or row.timing.get("calibrated_on_this") is True:
        return None
    return number(row, "error")


def error_bars(rows: Sequence[Result]) -> dict[str, Any]:
    """The range over the repeats as plotly draws it."""
    low = [number(row, "ms_per_token_low") for row in rows]
    high = [number(row, "ms_per_token_high") for row in rows]
    middle = [row.ms_per_token or 0.0 for row in rows]
    return {
        "type": "data",
        "symmetric": False,
        "array": [0.0 if h is None else max(0.0, h - m) for h, m in zip(high, middle, strict=True)],
        "arrayminus": [
            0.0 if n is None else max(0.0, m - n) for n, m in zip(low, middle, strict=True)
        ],
        "thickness": 1.2,
        "width": 3,
    }


def places(rows: Iterable[Result]) -> str:
    """The devices of measured rows, each with what must stand beside its figures."""
    return text.join(list(dict.fromkeys(_place(row) for row in rows if row.kind == "measured")))


def sentences(setting: Setting, names: Names) -> list[str]:
    """What the measured cells say: equal or not, who is fastest, how good the prediction was."""
    measured = [r for r in setting.rows if r.kind == "measured" and r.ms_per_token is not None]
    if not measured:
        return []
    found = []
    compared = [row for row in measured if "equal_to_simulation" in row.timing]
    equal = sum(row.timing["equal_to_simulation"] is True for row in compared)
    if compared:
        which = (
            f"In all {text.count(equal)} measured cells"
            if equal == len(compared)
            else f"In {text.count(equal)} of {text.count(len(compared))} measured cells"
        )
        found.append(f"{which} hits, misses and bytes are exactly those simulated.")
    found += _fastest(measured, names)
    errors = sorted(abs(e) for e in map(error_of, measured) if e is not None)
    if errors:
        found.append(
            f"Predicted milliseconds per token are off by {text.percent(errors[len(errors) // 2])}"
            f" in the median of {text.count(len(errors))} cells, by {text.percent(errors[-1])} at"
            " most."
        )
    return found


def _fastest(measured: Sequence[Result], names: Names) -> list[str]:
    """Per concurrency, at the size that the verdict quotes: the fewest milliseconds."""
    size = reference_size(measured)
    found = []
    for level in sorted({row.concurrency for row in measured}):
        rows = [row for row in by_concurrency(measured, level) if row.slots == size]
        if len(rows) < 2:
            continue
        best = min(rows, key=lambda row: row.ms_per_token or 0.0)
        lru = next((row for row in rows if row.policy == "lru"), None)
        against = ""
        if lru is not None and lru is not best and best.ms_per_token and lru.ms_per_token:
            against = f", {text.less_than(best.ms_per_token, lru.ms_per_token)} LRU"
        found.append(
            f"At {text.slots(best.slots)} slots and concurrency {level} the fastest measured is"
            f" {names[series_key(best)].label}: {text.amount(best.ms_per_token)} ms per token"
            f"{against}."
        )
    return found


def measured_table(setting: Setting, names: Names) -> str:
    """Measured cells beside what was predicted of them; empty without any."""
    rows = [r for r in setting.rows if r.kind == "measured" and r.ms_per_token is not None]
    if not rows:
        return ""
    rows.sort(key=lambda r: (r.concurrency, sum(r.slots), names[series_key(r)].index))
    heads = (
        "policy", "C", "slots", "counters", "measured ms / token", "range", "predicted", "error",
        "tokens / s", "upload GB/s", "of the link's peak", "plan µs / layer",
    )  # fmt: skip
    body = []
    for row in rows:
        equal = row.timing.get("equal_to_simulation")
        low, high = number(row, "ms_per_token_low"), number(row, "ms_per_token_high")
        error = error_of(row)
        cells = (
            text.count(row.concurrency),
            text.slots(row.slots),
            "as simulated" if equal is True else "DIFFERENT" if equal is False else text.NONE,
            text.amount(row.ms_per_token),
            f"{text.amount(low)} to {text.amount(high)}",
            text.amount(number(row, "predicted_ms_per_token")),
            "calibration"
            if row.timing.get("calibrated_on_this") is True
            else ("+" if error is not None and error > 0 else "") + text.percent(error),
            text.amount(number(row, "tokens_per_s")),
            text.amount(number(row, "upload_gb_s")),
            text.percent(number(row, "upload_efficiency")),
            text.amount(number(row, "plan_us_per_layer")),
        )
        label = escape(names[series_key(row)].label)
        body.append(
            f'<tr><th scope="row">{label} <small class="tag measured">measured</small></th>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        "<h3>Measured beside predicted</h3>"
        f"{_baselines(rows)}"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _baselines(rows: Sequence[Result]) -> str:
    """The runs without a cache, which the others have to beat."""
    found: dict[int, str] = {}
    for row in rows:
        each = row.timing.get("baselines_ms_per_token")
        if isinstance(each, Mapping) and each:
            shown = [
                f"{name} {text.amount(ms)}"
                for name in each
                if (ms := number(row, "baselines_ms_per_token", name)) is not None
            ]
            found.setdefault(row.concurrency, ", ".join(shown))
    return "".join(
        f'<p class="hint">Without a cache, at concurrency {level}, measured ms per token:'
        f" {escape(shown)}.</p>"
        for level, shown in sorted(found.items())
    )


def _place(row: Result) -> str:
    device, note = row.timing.get("device"), row.timing.get("device_note")
    name = str(device) if device else "a device that the row does not name"
    return f"{name} ({note})" if note else name
