"""A file of a name is whole: written under a temporary name beside it, then renamed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from simlab.errors import SimlabError, UsageError


def write_atomically(path: str | os.PathLike[str], body: bytes) -> None:
    """Write a whole file under a temporary name beside ``path``, then rename it.

    Raises:
        UsageError: the folder does not exist, or ``path`` is a folder.
        SimlabError: the file cannot be written; nothing is left behind.
    """
    path = Path(path)
    check_place(path)
    partial = path.with_name(f".{path.name[:80]}.{secrets.token_hex(4)}.part")
    try:
        try:
            with open(partial, "xb") as sink:
                sink.write(body)
                sink.flush()
                os.fsync(sink.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise SimlabError(
            f"cannot write {path}: {reason}; free some space or name another folder"
        ) from None


def check_place(path: Path) -> None:
    """Raise UsageError unless ``path`` can be the name of a file in a folder that exists."""
    if not path.parent.is_dir():
        raise UsageError(
            f"folder {path.parent} does not exist; create it (mkdir -p) or name another"
        )
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is a device or a pipe, which a file would replace; name a file")
