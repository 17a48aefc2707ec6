"""Where the policies, sample traces and experiments that come with simlab are.

In a checkout (an editable install too) they are the folders beside ``simlab/``, so that an edit is
seen by the next run; in an installed wheel they lie in ``simlab/_bundled/``. Nothing else in simlab
knows these places.
"""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path

from simlab.errors import SimlabError

FOLDERS = ("policies", "traces", "experiments")

SAMPLE_TRACE = "qwen3-30b-a3b-ar.parquet"
#: Captured from the tiny demo model.
CAPTURED_TRACE = "tiny-demo-model.parquet"


def _is_checkout(root: Path) -> bool:
    """Whether root holds simlab's own pyproject.toml (and not some project that vendors simlab)."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return bool(project["name"] == "simlab")
    except (OSError, ValueError, KeyError, TypeError):
        return False


@cache
def root() -> Path:
    """The folder that holds FOLDERS: the checkout, else ``simlab/_bundled``."""
    package = Path(__file__).resolve().parent
    return package.parent if _is_checkout(package.parent) else package / "_bundled"


def folder(name: str) -> Path:
    """The folder ``name``, one of FOLDERS.

    Raises:
        SimlabError: it is not there (a damaged install).
    """
    path = root() / name
    if name not in FOLDERS or not path.is_dir():
        raise SimlabError(f"simlab's own folder {name!r} is missing at {path}; reinstall simlab")
    return path


def default_trace() -> Path:
    """The sample that commands use when no trace is named: synthetic, Qwen3-30B-A3B's shape.

    Raises:
        SimlabError: it is not there.
    """
    path = folder("traces") / SAMPLE_TRACE
    if not path.is_file():
        raise SimlabError(
            f"the sample trace is missing at {path}; name a trace, or reinstall simlab"
        )
    return path


def find_trace(name: str | None) -> Path:
    """The file of a trace: a path, the name of a sample (``tiny-demo-model``), or the default.

    Raises:
        SimlabError: no name is given and the default sample is not there.
    """
    if name is None:
        return default_trace()
    path = Path(name)
    if len(path.parts) == 1 and not path.suffix and not os.path.exists(path):
        sample = root() / "traces" / f"{name}.parquet"
        if os.path.isfile(sample):
            return sample
    return path
