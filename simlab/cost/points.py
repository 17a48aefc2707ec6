"""Measured points: tokens per second at known hit rates, as a CSV file of anyone's runs.

Columns: ``tok_s`` (needed), ``hit_rate`` (0..1; empty: not known), ``cache_mib`` (0 or empty: no
cache), ``concurrency`` (default 1), ``host_share`` (share of the expert bytes that lie on the host;
default 1, not known where ``setup`` begins with "fit"), ``mib_per_token`` (all experts that a token
picks: gives bandwidths), and the text columns ``model gpu link setup source``. Unknown columns are
ignored. ``tok_s`` is the sum over all streams.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from simlab.errors import SimlabError, UsageError
from simlab.model.napkin import parse_link


@dataclass(frozen=True)
class Point:
    """One measured run.

    Attributes:
        step_ms: milliseconds of one step (all streams give a token).
        hit_rate: of the cached path, 0..1; None when not known or without a cache.
        host_share: share of the expert bytes that lie on the host; None when not known.
        cached: the run had an expert cache.
    """

    row: int
    label: str
    setup: str
    step_ms: float
    tok_s: float
    concurrency: int
    hit_rate: float | None
    host_share: float | None
    cached: bool
    mib_per_token: float | None

    @property
    def misses(self) -> float | None:
        """Share of all expert picks that cross the link; None when not known."""
        if self.hit_rate is None or self.host_share is None:
            return None
        return (1.0 - self.hit_rate) * self.host_share


@dataclass(frozen=True)
class Setup:
    """Points that share the parameters: one model, device, link and concurrency.

    ``mib_per_token``: as in the file; None when no point says it.
    """

    model: str
    gpu: str
    link: str
    concurrency: int
    points: tuple[Point, ...]
    mib_per_token: float | None = None

    @property
    def name(self) -> str:
        """As printed."""
        known = [text for text in (self.model, self.gpu, self.link) if text]
        return ", ".join([*known, f"C = {self.concurrency}"])

    @property
    def cached(self) -> list[Point]:
        """Runs with a cache."""
        return [point for point in self.points if point.cached]

    @property
    def without_cache(self) -> list[Point]:
        """Runs without one."""
        return [point for point in self.points if not point.cached]

    @property
    def token_bytes(self) -> float | None:
        """Bytes of all experts that a step picks, where that is known: one stream, no sharing."""
        if self.mib_per_token is None or self.concurrency != 1:
            return None
        return self.mib_per_token * 2**20

    @property
    def least_miss_ms(self) -> float:
        """What the link needs at least for those bytes, at its specified speed; 0: not known."""
        size = self.token_bytes
        try:
            return 0.0 if size is None else size / parse_link(self.link)[1] / 1e6
        except UsageError:
            return 0.0


def read_points(path: str | Path) -> list[Setup]:
    """The points of a CSV file, by setup, in the order of the file.

    Raises:
        UsageError: a column is missing or a cell is not what it must be; names the row.
        SimlabError: the file cannot be read.
    """
    path = Path(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if "tok_s" not in (reader.fieldnames or ()):
                raise UsageError(f"{path} has no column tok_s (measured tokens per second)")
            rows = list(reader)
    except OSError as exc:
        raise SimlabError(f"cannot read {path}: {exc.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as exc:
        raise SimlabError(f"{path} is not a CSV file: {exc}") from None
    if not rows:
        raise UsageError(f"{path} holds no point")
    return _setups((_key(row), _point(path, number, row)) for number, row in enumerate(rows, 2))


def _setups(points: Iterable[tuple[tuple[str, str, str], Point]]) -> list[Setup]:
    found: dict[tuple[str, str, str, int], list[Point]] = {}
    for key, point in points:
        found.setdefault((*key, point.concurrency), []).append(point)
    return [
        Setup(
            *key, tuple(members), next((p.mib_per_token for p in members if p.mib_per_token), None)
        )
        for key, members in found.items()
    ]


def _key(row: dict[str, str | None]) -> tuple[str, str, str]:
    model, gpu, link = ((row.get(name) or "").strip() for name in ("model", "gpu", "link"))
    return model, gpu, link


def _point(path: Path, number: int, row: dict[str, str | None]) -> Point:
    def cell(name: str, low: float, high: float) -> float | None:
        text = (row.get(name) or "").strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise UsageError(
                f"{path}, line {number}: {name} must be {low:g}..{high:g}, not {text!r}"
            )
        return value

    speed = cell("tok_s", 1e-9, 1e9)
    if speed is None:
        raise UsageError(f"{path}, line {number}: tok_s is empty")
    lanes = cell("concurrency", 1, 2**20) or 1.0
    if lanes != int(lanes):
        raise UsageError(f"{path}, line {number}: concurrency must be a whole number, not {lanes}")
    setup = (row.get("setup") or "").strip()
    share = cell("host_share", 0, 1)
    if share is None and not setup.lower().startswith("fit"):
        share = 1.0
    hit_rate = cell("hit_rate", 0, 1)
    cache = cell("cache_mib", 0, 1e12)
    label = setup or "point"
    if cache:
        label += f", {cache:g} MiB"
    return Point(
        row=number,
        label=label,
        setup=setup,
        step_ms=1000.0 * lanes / speed,
        tok_s=speed,
        concurrency=int(lanes),
        hit_rate=hit_rate,
        host_share=share,
        cached=bool(cache) or hit_rate is not None,
        mib_per_token=cell("mib_per_token", 1e-6, 1e9),
    )
