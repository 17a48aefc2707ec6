"""What all tests share: where the checkout and the reference data are, and a cache of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: its threads wait for each other, and where tests run side by side or the
# machine is busy, tiny models then take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts jobs in the background with Ctrl-C ignored; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout under test."""
    return REPO


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real traces and golden figures, which lies beside the checkout."""
    path = REPO.parent / "shared"
    if not path.is_dir():
        pytest.skip(
            "the folder shared/ with real traces and golden figures is not beside the checkout"
        )
    return path


@pytest.fixture(scope="session", autouse=True)
def isolated_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the user's cache out of the tests; one session shares its compiled policies."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "simlab-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMLAB_CACHE_DIR", str(path))
        patch.delenv("SIMLAB_DEBUG", raising=False)
        yield path
