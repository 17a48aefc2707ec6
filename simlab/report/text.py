"""How a report writes numbers: thin spaces between thousands, one decimal, a dash for unknown."""

from __future__ import annotations

from collections.abc import Sequence

THIN = "\u202f"  # narrow no-break space
MINUS = "\u2212"
NONE = "\u2013"


def count(value: int | None) -> str:
    """1834 -> "1 834" (thin space)."""
    return NONE if value is None else f"{value:,}".replace(",", THIN).replace("-", MINUS)


def percent(share: float | None) -> str:
    """0.597 -> "59.7 %"; a share below 1 never reads as 100 %, one above 0 never as 0 %."""
    if share is None:
        return NONE
    for digits in (1, 2):
        number = f"{100 * share:.{digits}f}"
        if float(number) not in (0.0, 100.0) or share in (0.0, 1.0):
            return number.replace("-", MINUS) + THIN + "%"
    return ("<0.01" if float(number) == 0 else ">99.99") + THIN + "%"


def amount(value: float | None) -> str:
    """MiB or uploads: about three significant digits, whole numbers from 100 on."""
    if value is None:
        return NONE
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 or value == 0 else 2
    text = f"{value:,.{digits}f}".replace(",", THIN).replace("-", MINUS)
    return "0" if value == 0 else text


def points(share: float) -> str:
    """A difference of two rates in percentage points, without sign: 0.213 -> "21.3"."""
    return f"{abs(100 * share):.1f}"


def less_than(value: float, other: float) -> str:
    """How ``value`` compares with ``other``: "24 % less than", "31 times less than"."""
    if other == 0 or value == other:
        return "the same as" if value == other else "more than"
    ratio = value / other
    if ratio > 1:
        return f"{_tenths(ratio - 1)}{THIN}% more than"
    if 0 < ratio < 0.2:
        return f"{amount(1 / ratio)} times less than"
    return f"{_tenths(1 - ratio)}{THIN}% less than"


def join(parts: Sequence[str]) -> str:
    """Join words as prose does: "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def slots(groups: Sequence[int]) -> str:
    """Slots of each group: "192", "1 834 × 2" for equal groups, "96 + 48" otherwise."""
    if len(groups) > 1 and len(set(groups)) == 1:
        return f"{count(groups[0])} × {len(groups)}"
    return " + ".join(count(n) for n in groups)


def _tenths(ratio: float) -> str:
    """A relative change in percent: "24", below one percent "0.4"."""
    return f"{100 * ratio:.0f}" if ratio >= 0.01 else f"{max(100 * ratio, 0.1):.1f}"
