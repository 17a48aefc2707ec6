"""What ``simlab explain`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from simlab.cli.compare_text import named
from simlab.cli.lab_options import heading

if TYPE_CHECKING:
    from simlab.analysis.explain import Explanation
    from simlab.replay.run import Replayer

_CAUSES = {
    "cold": "first use of the key",
    "capacity": "{bound} misses it too",
    "policy": "{bound} hits it: the policy's choice",
    "large": "in steps that fill nothing",
}


def explained_lines(
    found: Sequence[Explanation], replayer: Replayer, parts: Sequence[str], top: int
) -> list[str]:
    """All cells, one below the other."""
    lines = [*heading(replayer), f"Policy: {named(found[0].row)}"]
    if found[0].row.needs_engine_change:
        lines.append("* needs an engine change: llama.cpp itself cannot decline a miss")
    for one in found:
        lines += ["", *_cell(one, parts, top)]
    return [*lines, *dict.fromkeys(note for one in found for note in one.row.notes)]


def _cell(one: Explanation, parts: Sequence[str], top: int) -> list[str]:
    row, bound = one.row, one.bound
    misses = row.counters.misses
    size = " + ".join(f"{n:,}" for n in row.slots) + " slots"
    if row.semantics == "bmoe" and row.capacity_bytes:
        size = f"{row.capacity_bytes / 2**20:,.0f} MiB"
    lines = [f"{size} ({row.slots_share:.1%} of all experts), C = {row.concurrency}"]
    rates = [f"{100 * r:.2f} %" if r is not None else "-" for r in (row.hit_rate, bound.hit_rate)]
    lines.append(
        f"  {row.counters.lookups:,} lookups, {misses:,} misses; hit rate {rates[0]},"
        f" {bound.policy} {rates[1]} ({bound.counters.misses:,} misses)"
    )
    for cause, meaning in _CAUSES.items():
        n = one.total[cause]
        if n or cause != "large":
            text = meaning.format(bound=bound.policy)
            lines.append(f"  {cause:<9} {n:>12,}  {_share(n, misses):>7}  {text}")
    lines.append(f"  {'':<9} {one.lucky:>12,}  {'':>7}  hits that {bound.policy}'s run misses")
    lines += [f"  cliff: {line}" for line in _cliff(one)]
    lines += [f"  reuse: {line}" for line in _reuse(one)]
    lines += [f"  declined: {line}" for line in _declined(one)]
    for part in parts:
        lines += _table(part, getattr(one, f"by_{part}"), top)
    return lines


def _share(n: float, whole: float) -> str:
    return f"{100 * n / whole:.1f} %" if whole else "-"


def _cliff(one: Explanation) -> list[str]:
    row = one.row
    least = min(row.slots)
    cycle = "{min:,} / {median:,} / {max:,}".format(**row.cycle)
    where = "at or below" if least <= row.cliff_slots else "above"
    text = f"a step touches {cycle} keys (min / median / max); {least:,} slots are {where} "
    text += f"{row.cliff_slots:,.0f}"
    if least <= row.cliff_slots:
        text += ": plain LRU evicts an expert before its layer comes again"
    return [text]


def _reuse(one: Explanation) -> list[str]:
    reuse = one.reuse
    if not reuse.quantiles:
        return ["no key is looked up twice"]
    again = reuse.within + reuse.beyond
    middle = ", ".join(f"{float(q):.0%} {v:,}" for q, v in reuse.quantiles.items())
    return [
        f"distinct keys between two uses of a key: {middle}",
        f"{_share(reuse.beyond, again)} of {again:,} reuses come from farther than the slots;"
        f" {reuse.missed_within:,} misses come from within them",
    ]


def _declined(one: Explanation) -> list[str]:
    declined = one.declined
    if declined is None:
        return []
    n = declined.total
    return [
        f"{n:,} misses; used again within as many distinct keys as there are slots"
        f" {_share(declined.soon, n)}, later {_share(declined.late, n)},"
        f" never {_share(declined.never, n)}",
        f"{_share(declined.bound_hits, n)} are used again where {one.bound.policy} hits",
    ]


def _table(part: str, rows: Sequence[dict[str, Any]], top: int) -> list[str]:
    if not rows:
        return [f"  by {part}: no request has a tag"] if part == "tag" else []
    if part in ("layer", "expert"):
        rows = sorted(rows, key=lambda row: -row["policy"])
    shown = rows[:top] if top else rows
    cut = f", {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
    order = ", most policy misses first" if part in ("layer", "expert") else ""
    names = [name for name in shown[0] if name not in ("cold", "hit", *_CAUSES)]
    width = max(len(_name(row, names)) for row in shown)
    columns = "".join(f"{cause:>12}" for cause in _CAUSES)
    lines = [f"  by {part}{order}{cut}", f"    {'':<{width}}{'hits':>12}{columns}"]
    for row in shown:
        total = row["hit"] + sum(row[cause] for cause in _CAUSES)
        counts = "".join(f"{row[cause]:>12,.0f}" for cause in _CAUSES)
        lines.append(f"    {_name(row, names):<{width}}{_share(row['hit'], total):>12}{counts}")
    return lines


def _name(row: dict[str, Any], names: Sequence[str]) -> str:
    if "first_step" in row:
        return f"steps {row['first_step']:,}-{row['last_step']:,}"
    return ", ".join(f"{name} {row[name]}" for name in names)
