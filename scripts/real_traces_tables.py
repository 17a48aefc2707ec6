"""Markdown tables of what real_traces.py wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Line = Mapping[str, str]
#: Rows that the CPU helps; they stand in a table of their own.
DECLINING = (", bytes", ", hits", "static-pin")
#: Above the tables.
HEADING = (
    "# What the real traces say: every cell",
    "",
    "Written by `python scripts/real_traces.py experiments/*.toml --tables`;",
    "[findings.md](findings.md) reads it. Second halves of the requests, 95 % intervals over them;",
    "parameters chosen on the first halves. Simulated.",
    "",
)


def summary_of(lines: Sequence[Line]) -> list[str]:
    """The gap that each row closes, all traces, without intervals: one line a trace and C."""
    rows = [r for r in _unique(lines, "row") if r not in ("lru", "opt") and not _declines(r)]
    sizes = _unique(lines, "slots")
    text = [f"| trace, C | {' | '.join(rows)} |", "|---" * (len(rows) + 1) + "|"]
    for trace in _unique(lines, "trace"):
        for lanes in _unique(lines, "concurrency"):
            mine = [x for x in lines if (x["trace"], x["concurrency"]) == (trace, lanes)]
            at = {(x["row"], x["slots"]): x["gap_closed"] for x in mine}
            told = [" / ".join(_percent(at.get((r, s), ""), 0) for s in sizes) for r in rows]
            text.append(f"| {trace}, {lanes} | {' | '.join(told)} |")
    return [
        f"Share of the LRU-to-OPT gap closed, %, at {' / '.join(sizes)} of the keys:",
        "",
        *text,
    ]


def tables_of(lines: Sequence[Line]) -> list[str]:
    """The tables of one trace, as lines of Markdown.

    Args:
        lines: of its CSV file, as csv.DictReader gives them.
    """
    if not lines:
        return ["Nothing was written for this trace yet."]
    text = [
        f"## {lines[0]['trace']}",
        "",
        f"{lines[0]['requests']} requests in the second half.",
        "",
    ]
    for lanes in _unique(lines, "concurrency"):
        mine = [x for x in lines if x["concurrency"] == lanes]
        rows = [r for r in _unique(lines, "row") if not _declines(r)]
        text += [f"C = {lanes}: hit rate, %", "", *_table(mine, rows, _rate), ""]
        rows = [r for r in rows if r not in ("lru", "opt")]
        text += [f"C = {lanes}: share of the gap closed, %", "", *_table(mine, rows, _gap), ""]
        rows = [r for r in _unique(lines, "row") if _declines(r)]
        text += [f"C = {lanes}: misses declined", "", *_declined(mine, rows), ""]
    return [*text, *_chosen(lines), "", *_below_lru(lines), ""]


def _unique(lines: Sequence[Line], column: str) -> list[str]:
    return list(dict.fromkeys(line[column] for line in lines))


def _declines(row: str) -> bool:
    return row.endswith(DECLINING)


def _table(lines: Sequence[Line], rows: Sequence[str], cell: Callable[[Line], str]) -> list[str]:
    sizes = _unique(lines, "slots")
    at = {(line["row"], line["slots"]): line for line in lines}
    text = [f"| | {' | '.join(sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for row in rows:
        told = [cell(at[row, size]) if (row, size) in at else "" for size in sizes]
        text.append(f"| {row} | {' | '.join(told)} |")
    return text


def _declined(lines: Sequence[Line], rows: Sequence[str]) -> list[str]:
    """Rows that leave misses to the CPU: what they save, and what it costs in hits."""
    text = [
        "| slots | | chosen | hits above LRU, points | uploads a token | LRU's | fewer bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in _unique(lines, "slots"):
        at = {line["row"]: line for line in lines if line["slots"] == size}
        before = _number(at["lru"], "uploads_per_token") if "lru" in at else "-"
        for row in [r for r in rows if r in at]:
            line = at[row]
            chosen = line["chosen"].partition(":")[2].replace("_", " ").replace(",", ", ") or "-"
            text.append(
                f"| {size} | {row} | {chosen} | {_interval(line, 'above_lru')}"
                f" | {_number(line, 'uploads_per_token')} | {before}"
                f" | {_number(line, 'bytes_lru_over')} |"
            )
    return text


def _chosen(lines: Sequence[Line]) -> list[str]:
    """What was chosen on the first half, where there was a choice."""
    text = ["Chosen on the first half, from the smallest size to the largest:", ""]
    for row in [r for r in _unique(lines, "row") if not _declines(r)]:
        for lanes in _unique(lines, "concurrency"):
            mine = [x for x in lines if x["row"] == row and x["concurrency"] == lanes]
            if any(x["chosen"] != row for x in mine):
                text.append(f"- {row}, C = {lanes}: " + ", ".join(f"`{x['chosen']}`" for x in mine))
    return text


def _below_lru(lines: Sequence[Line]) -> list[str]:
    """Cells where a row hits less than LRU, said plainly."""
    found = [
        f"- {line['row']}, C = {line['concurrency']}, {line['slots']}:"
        f" {_interval(line, 'above_lru')}"
        for line in lines
        if line["above_lru"] and float(line["above_lru"]) < 0
    ]
    return ["Below LRU's hit rate (points):", "", *(found or ["- nothing"])]


def _gap(line: Line) -> str:
    return _interval(line, "gap_closed")


def _rate(line: Line) -> str:
    return _interval(line, "hit_rate")


def _interval(line: Line, name: str) -> str:
    value, low, high = (_percent(line[f"{name}{end}"], 1) for end in ("", "_low", "_high"))
    return value if low == "-" else f"{value} ({low} .. {high})"


def _percent(value: str, digits: int) -> str:
    return f"{100 * float(value):.{digits}f}" if value else "-"


def _number(line: Line, name: str) -> str:
    if not line[name]:
        return "-"
    value = float(line[name])
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
