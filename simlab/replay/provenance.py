"""What is written beside every figure so that it can be made again."""

from __future__ import annotations

import platform
import time
from typing import Any

import numba
import numpy as np

import simlab
from simlab.trace.schema import TraceMeta


def provenance(meta: TraceMeta, command: str, started: float) -> dict[str, Any]:
    """Command, versions, host, times and warm-up rule of one cell.

    Args:
        started: seconds since the epoch.
    """
    return {
        "command": command,
        "versions": {
            "simlab": simlab.__version__,
            "numba": numba.__version__,
            "numpy": np.__version__,
        },
        "host": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "warm_up": "none: the cache starts empty and every step counts",
        "trace_source": meta.source,
        "trace_command": meta.command,
    }
