"""Cache sizes as a user writes them: a count of slots per group, or a share of a group's keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from simlab.errors import UsageError
from simlab.model.layout import ExpertLayout


@dataclass(frozen=True)
class Size:
    """One asked size. ``share``: of the keys of each group; else ``count`` slots in each group."""

    text: str
    count: int = 0
    share: Fraction | None = None

    def slots(self, layout: ExpertLayout) -> tuple[list[int], list[str]]:
        """Slots of each group, at least 1 and at most its keys, and a note if it was clipped."""
        slots: list[int] = []
        notes: list[str] = []
        for i in range(len(layout.groups)):
            keys = layout.keys_of(i)
            wanted = self.count if self.share is None else int(keys * self.share)
            if wanted < 1:
                notes.append(f"--slots {self.text} is less than one of {keys} keys: 1 slot")
                wanted = 1
            if wanted > keys:
                notes.append(f"--slots {self.text} clipped to all {keys} keys of group {i + 1}")
            slots.append(min(wanted, keys))
        return slots, notes


def parse_sizes(text: str) -> list[Size]:
    """Read ``1834``, ``25%`` or several of them separated by commas.

    Raises:
        UsageError: not a whole number or a percentage above 0.
    """
    return [_parse(part.strip()) for part in text.split(",")]


def _parse(text: str) -> Size:
    what = f"--slots takes slots per group (1834) or a share of the keys (25%), not {text!r}"
    try:
        if text.endswith("%"):
            number = text[:-1].strip()
            if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", number):
                raise UsageError(what)
            share = Fraction(number) / 100
            if not 0 < share:
                raise UsageError(f"{what}: it must be above 0")
            return Size(text, share=min(share, Fraction(1)))
        count = int(text)
    except ValueError:
        raise UsageError(what) from None
    if count < 1:
        raise UsageError(f"{what}: a pool needs at least 1 slot")
    return Size(text, count=count)
