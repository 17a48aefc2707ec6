"""How several commands read the same options."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from simlab.errors import UsageError

if TYPE_CHECKING:
    from simlab.policy.loader import Policy


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
        try:
            given[name] = float(value)
        except ValueError:
            raise UsageError(f"--param {name} takes one number, not {value!r}") from None
    return given


def chosen_policies(texts: Sequence[str]) -> list[Policy]:
    """Policies by name or file, several of them separated by commas, or ``all``; none twice.

    Raises:
        UsageError: no such policy, or two files with one name. PolicyError: a file is unusable.
    """
    from simlab.policy.registry import load_policies, policy_names

    names: list[str] = []
    for text in texts:
        if text == "all":
            names += policy_names()
        else:  # a file's name may hold a comma
            names += [text] if os.path.isfile(text) else [p.strip() for p in text.split(",")]
    return load_policies(dict.fromkeys(names))


def policy_with_parameters(spec: str) -> tuple[Policy, dict[str, float]]:
    """A policy and its parameters from ``mix-tr:lift=0.5`` or ``./mine.py:margin=1,half_life=8``.

    Raises:
        UsageError: no such policy, or a parameter is not one of its own, or out of range.
        PolicyError: a file is unusable.
    """
    from simlab.policy.registry import load_policy

    name, colon, rest = spec.rpartition(":")
    if not colon or os.path.isfile(spec) or (rest and "=" not in rest):
        name, rest = spec, ""  # a file's name may hold a colon
    policy = load_policy(name)
    given = parameters([part.strip() for part in rest.split(",")]) if rest else {}
    policy.values(given)
    return policy, given
