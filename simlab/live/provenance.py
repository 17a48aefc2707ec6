"""What is written beside every measured figure so that it can be made again."""

from __future__ import annotations

import platform
import time
from typing import Any

import simlab
from simlab.live.device import Device


def provenance(device: Device, command: str, started: float) -> dict[str, Any]:
    """Command, versions, host, device and times.

    Args:
        started: seconds since the epoch.
    """
    versions = {"simlab": simlab.__version__, "torch": str(device.torch.__version__)}
    runtime = device.torch.version.cuda or device.torch.version.hip
    if device.kind == "cuda" and runtime:
        versions["cuda or hip"] = str(runtime)
    return {
        "command": command,
        "versions": versions,
        "host": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "device": f"{device.name} ({device.note or device.kind})",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
    }
