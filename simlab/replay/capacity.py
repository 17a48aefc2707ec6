"""A pool whose capacity varies over time, as when the KV cache lends its free pages to experts.

A capacity file is a CSV with the columns ``step`` and ``share``: from that step on (counted from 0,
prompts' steps included) a pool has that share of its slots, at most all. Before the first row it
has all.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from simlab.errors import SimlabError, UsageError

_LARGEST = 64 << 20


@dataclass(frozen=True)
class Capacity:
    """``steps``: ascending, ``shares``: 0..1, of each row."""

    steps: tuple[int, ...]
    shares: tuple[Fraction, ...]

    def slots_at(self, slots: int, n_steps: int) -> npt.NDArray[np.int64]:
        """Slots of a pool in each step: int64 [n_steps]."""
        result = np.full(n_steps, slots, np.int64)
        for step, share in zip(self.steps, self.shares, strict=True):
            result[min(step, n_steps) :] = int(slots * share)
        return result


def read_capacity(path: str | os.PathLike[str]) -> Capacity:
    """Read a capacity file.

    Raises:
        UsageError: there is none. SimlabError: a row is not what it should be; names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no file {path}; --capacity takes a CSV: step,share")
    if path.stat().st_size > _LARGEST:
        raise SimlabError(f"{path} is larger than 64 MiB; give one row a change")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return _parse(path, list(csv.reader(file)))
    except (UnicodeDecodeError, csv.Error):
        raise SimlabError(f"{path} is not a CSV file with the columns step,share") from None


def _parse(path: Path, rows: Sequence[Sequence[str]]) -> Capacity:
    if not rows or [name.strip() for name in rows[0]] != ["step", "share"]:
        raise SimlabError(f"{path}, line 1: the columns must be step,share")
    steps: list[int] = []
    shares: list[Fraction] = []
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        try:
            step, share = row
            number_of = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,12})?)(%?)", share.strip())
            if not number_of or not re.fullmatch(r"[0-9]{1,12}", step.strip()):
                raise ValueError
            steps.append(int(step))
            shares.append(Fraction(number_of[1]) / (100 if number_of[2] else 1))
        except ValueError:
            raise SimlabError(
                f"{path}, line {number}: a row is a step and a share, as 120,0.5 or 120,50%"
            ) from None
        if shares[-1] > 1:
            raise SimlabError(f"{path}, line {number}: shares lie in 0 to 1")
        if len(steps) > 1 and steps[-1] <= steps[-2]:
            raise SimlabError(f"{path}, line {number}: steps must ascend")
    if not steps:
        raise SimlabError(f"{path} has no row: --capacity needs one a change")
    return Capacity(tuple(steps), tuple(shares))
