"""Policies by name: the files of the top-level folder policies/, those that other installed
packages offer (entry points of the group ``simlab.policies``), and anyone's own file by path.

A package offers a policy by naming the module that is its policy file::

    [project.entry-points."simlab.policies"]
    my-policy = "my_package.my_policy"
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from simlab.errors import PolicyError, UsageError
from simlab.policy.loader import Policy, load_policy_file
from simlab.resources import folder

ENTRY_POINTS = "simlab.policies"


def policy_names() -> list[str]:
    """Names of the built-in policies, sorted; no file is executed."""
    return sorted(p.stem.replace("_", "-") for p in folder("policies").glob("[a-z]*.py"))


def outside_policies() -> dict[str, str]:
    """Policies that other installed packages offer: name -> module; nothing is executed.

    Raises:
        PolicyError: a name is taken, by simlab or by another package.
    """
    found: dict[str, str] = {}
    taken = dict.fromkeys(policy_names(), "simlab")
    for entry in entry_points(group=ENTRY_POINTS):
        owner = entry.dist.name if entry.dist else entry.value
        if entry.name in taken and found.get(entry.name) != entry.value:
            raise PolicyError(
                f"package {owner} offers a policy {entry.name!r}, a name that"
                f" {taken[entry.name]} has; uninstall one of them"
            )
        taken[entry.name] = f"package {owner}"
        found[entry.name] = entry.value
    return found


def load_policies(specs: Iterable[str]) -> list[Policy]:
    """Load several policies, each once.

    Raises:
        UsageError: no such policy, or two files with one name. PolicyError: a file is unusable.
    """
    chosen: dict[str, Policy] = {}
    for spec in specs:
        policy = load_policy(spec)
        other = chosen.setdefault(policy.name, policy)
        if other.path.resolve() != policy.path.resolve():
            raise UsageError(
                f"{other.path} and {policy.path} both name their policy {policy.name!r}; change"
                " NAME in one of them"
            )
    return list(chosen.values())


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
        outside = outside_policies()
        if text in outside:
            return _load_outside(text, outside[text])
        names = sorted([*names, *outside])
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


def _load_outside(name: str, module: str) -> Policy:
    try:
        spec = importlib.util.find_spec(module)
    except Exception as exc:  # a parent package is imported, and anything may happen there
        raise PolicyError(f"policy {name}: {module}: {type(exc).__name__}: {exc}") from None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise PolicyError(f"policy {name}: its package names {module!r}, which is no Python file")
    policy = load_policy_file(Path(spec.origin))
    if policy.name != name:
        raise PolicyError(f"{policy.path} names itself {policy.name!r}, its package says {name!r}")
    return policy
