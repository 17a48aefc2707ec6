"""Policies by name: the files of the top-level folder policies/, and anyone's own file by path."""

from __future__ import annotations

import difflib
from pathlib import Path

from simlab.errors import PolicyError, UsageError
from simlab.policy.loader import Policy, load_policy_file
from simlab.resources import folder


def policy_names() -> list[str]:
    """Names of the built-in policies, sorted; no file is executed."""
    return sorted(p.stem.replace("_", "-") for p in folder("policies").glob("[a-z]*.py"))


def load_policy(spec: str | Path) -> Policy:
    """Load a policy by name (``lru``) or by file (``./mine.py``).

    Raises:
        UsageError: no such policy; the nearest name is offered.
        PolicyError: the file is unusable.
    """
    text = str(spec)
    if text.endswith(".py") or "/" in text or "\\" in text:
        path = Path(text)
        if not path.is_file():
            raise UsageError(
                f"no policy file {text}; policies by name: {', '.join(policy_names())}"
            )
        return load_policy_file(path)
    names = policy_names()
    if text not in names:
        close = difflib.get_close_matches(text, names, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(
            f"no policy {text!r}; {hint}known: {', '.join(names)}; or a file: ./mine.py"
        )
    policy = load_policy_file(folder("policies") / f"{text.replace('-', '_')}.py")
    if policy.name != text:
        raise PolicyError(
            f"{policy.path} names itself {policy.name!r}, its file name says {text!r}"
        )
    return policy
