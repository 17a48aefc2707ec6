"""What ``simlab frontier`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simlab.cli.compare_text import percent
from simlab.cli.lab_options import heading, size_of

if TYPE_CHECKING:
    from simlab.analysis.frontier import Frontier, Point
    from simlab.replay.run import Replayer


def frontier_lines(found: Sequence[Frontier], replayer: Replayer) -> list[str]:
    """All cells, one below the other, then what the figures mean."""
    lines = heading(replayer)
    for one in found:
        lines += ["", *_cell(one)]
    return [
        *lines,
        "",
        "mu: hits that an upload has to earn (0: as many hits as possible, then fewest uploads)",
        "at most / at least: what no policy with as many uploads, or hits, gets beyond",
    ]


def _cell(one: Frontier) -> list[str]:
    spans = ", ".join(f"{first:,}-{first + n - 1:,}" for first, n in one.windows[:6])
    spans += ", ..." * (len(one.windows) > 6)
    if one.whole:
        where = "exact over the whole run"
    else:
        where = (
            f"exact in each of {len(one.windows)} windows ({one.covered:.1%} of the run: steps"
            f" {spans}), each from an empty cache, added up"
        )
    unit = "MiB/token" if one.bytes_known else ""
    names = [f"frontier, mu = {point.mu:g}" for point in one.points]
    names += [_name(point) for point in one.policies]
    width = max(map(len, names))
    lines = [
        f"{size_of(one.cell)}: {one.lookups:,} lookups; {where}",
        f"  {'':<{width}}{'hit rate':>10}{'uploads/token':>15}{unit:>12}",
    ]
    for name, point in zip(names, [*one.points, *one.policies], strict=True):
        limits = _limits(one, point) if point.policy else ""
        lines.append(f"  {name:<{width}}{_figures(one, point)}{limits}")
    return lines


def _name(point: Point) -> str:
    params = ", ".join(f"{name}={value:g}" for name, value in (point.params or {}).items())
    return point.policy + (f" ({params})" if params else "")


def _figures(one: Frontier, point: Point) -> str:
    text = f"{percent(point.hit_rate):>10}{sum(point.uploads) / one.tokens:>15,.2f}"
    return text + (f"{point.moved / 2**20 / one.tokens:>12,.2f}" if one.bytes_known else "")


def _limits(one: Frontier, point: Point) -> str:
    assert point.most_hits is not None and point.least_moved is not None
    least = point.least_moved / one.tokens
    unit = f"{least / 2**20:,.2f} MiB" if one.bytes_known else f"{least:,.2f} uploads"
    return f"   at most {percent(point.most_hits / one.lookups)}, at least {unit}"
