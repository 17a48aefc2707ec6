"""Where simlab keeps files that it can make again: decoded traces and compiled policies."""

from __future__ import annotations

import os
from pathlib import Path

#: Environment variable that names the cache folder in place of the user's own.
ENVIRONMENT = "SIMLAB_CACHE_DIR"


def cache_folder(kind: str) -> Path | None:
    """The folder for one kind of cached files, made if absent; never raises.

    Args:
        kind: a plain folder name, such as ``decoded`` or ``compiled``.

    Returns:
        A folder that exists and can be written, or None when there is no such place (read-only
        home, a file in the way): the caller then works without a cache.
    """
    try:
        named = os.environ.get(ENVIRONMENT, "")
        if named:
            root = Path(named).expanduser()
        else:
            import platformdirs

            root = Path(platformdirs.user_cache_dir("simlab", appauthor=False))
        folder = root.absolute() / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK | os.X_OK) else None
    except (OSError, RuntimeError, ValueError, ImportError):
        return None
