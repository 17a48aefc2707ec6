"""The command as typed, for the provenance of what it writes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_arguments: list[str] = []


def record(arguments: Sequence[str]) -> None:
    """Remember the arguments of this run; the command line's main does."""
    _arguments[:] = arguments


def command_line() -> str:
    """The command as one line that a shell would read back."""
    return shlex.join(["simlab", *_arguments])
