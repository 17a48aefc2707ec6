"""Cache sizes as a user writes them: a count of slots per group, or a share of a group's keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
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


#: Most sizes of a curve: a row each, for every policy and concurrency.
MOST_SIZES = 8192


def parse_sizes(text: str) -> list[Size]:
    """Read ``1834``, ``25%``, a range ``64-1024:64`` or ``10%-50%:5%`` (both ends count; the step
    is 1 or 1 % where none is given), or several of them separated by commas.

    Raises:
        UsageError: not a whole number or a percentage above 0, a range that holds no size, or more
            than MOST_SIZES of them.
    """
    sizes: list[Size] = []
    for part in text.split(","):
        first, dash, rest = part.strip().partition("-")
        sizes += _range(part.strip(), first, rest) if first and dash else [_parse(part.strip())]
        if len(sizes) > MOST_SIZES:
            raise UsageError(
                f"--slots {text} is more than {MOST_SIZES:,} sizes: take a larger step"
            )
    return sizes


def even_sizes(count: int) -> list[Size]:
    """``count`` sizes, evenly spaced up to all keys.

    Raises:
        UsageError: not 1 to MOST_SIZES.
    """
    if not 1 <= count <= MOST_SIZES:
        raise UsageError(f"--sizes takes 1 to {MOST_SIZES:,} sizes, not {count}")
    shares = (Fraction(i, count) for i in range(1, count + 1))
    return [Size(f"{100 * float(share):g}%", share=share) for share in shares]


def curve_sizes() -> list[Size]:
    """What a curve has if no size is asked for: 1 slot, each percent up to 20, then each 2.5."""
    return parse_sizes("1,1%-20%,22.5%-100%:2.5%")


def _range(text: str, first: str, rest: str) -> list[Size]:
    last, colon, by = rest.partition(":")
    low, high = _parse(first), _parse(last)
    step = _parse(by) if colon else replace(low, count=1, share=low.share and Fraction(1, 100))
    if len({size.share is None for size in (low, high, step)}) > 1:
        raise UsageError(
            f"--slots {text}: a range is of slots or of shares, as 64-1024:64, 5%-50%:5%"
        )
    a, b, by_ = (n.count if n.share is None else n.share for n in (low, high, step))
    if b < a:
        raise UsageError(f"--slots {text}: the range ends before it begins")
    many = min(int((b - a) / by_) + 1, MOST_SIZES + 1)
    values = [a + i * by_ for i in range(many)]
    if low.share is None:
        return [Size(str(n), count=int(n)) for n in values]
    return [Size(f"{100 * float(n):g}%", share=Fraction(n)) for n in values]


def _parse(text: str) -> Size:
    what = (
        "--slots takes slots per group (1834) or a share of the keys (25%), or ranges of them"
        f" (64-1024:64), not {text!r}"
    )
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
