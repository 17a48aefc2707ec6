"""How several commands read the same options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simlab.errors import UsageError


def numbers(text: str, kind: type, what: str) -> list[Any]:
    """Numbers separated by commas.

    Raises:
        UsageError: something else; ``what`` names the option.
    """
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{what} takes numbers separated by commas, not {text!r}") from None


def parameters(texts: Sequence[str]) -> dict[str, float]:
    """Parameters of policies, each NAME=VALUE.

    Raises:
        UsageError: something else.
    """
    given: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--param takes NAME=VALUE, not {text!r}")
        given[name] = numbers(value, float, f"--param {name}")[0]
    return given
