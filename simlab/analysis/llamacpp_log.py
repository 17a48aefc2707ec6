"""What llama.cpp's log tells of its expert cache: the lines at startup and at exit.

The forms are those of src/llama-moe-cache.cpp; llama-server prints them at -lv 4. What stands
before them on a line (time stamps, the name of a unit) does not matter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from simlab.errors import SimlabError, UsageError

_LARGEST = 1 << 30
_LONGEST_LINE = 4096

# numbers and names are of bounded length: a log may hold anything
_DEVICE = re.compile(
    r": +([!-~]{1,64}) MoE cache size = +(\d{1,12}\.\d\d) MiB for (\d{1,12}\.\d\d) MiB"
    r" of host experts"
)
_GROUP = re.compile(r": +(\d{1,5}) layers, ([!-~]{1,32}): +(\d{1,12}) slots \((\d{1,5}\.\d)%\)")
_EXIT = re.compile(
    r"llama_moe_cache: ubatch( <=|  >) 8: hits = (\d{1,18}), misses = (\d{1,18}),"
    r" hit rate = (\d{1,3}\.\d\d)%, uploaded = (\d{1,18}\.\d\d) MiB"
)
_COPIED = re.compile(
    r"llama_moe_cache: large batches: (\d{1,18}) experts copied from the cache,"
    r" (\d{1,18}\.\d\d) MiB"
)
_TOO_SMALL = re.compile(r"MoE cache budget is too small for (\d{1,5}) layers, they are not cached")
_REFUSED = "MoE cache is too small to hold the experts of one token"
_DISABLED = "no layer has all of its experts in host memory, MoE cache is disabled"
_FLAG = re.compile(r"--moe-cache-mib[ =](\d{1,9})\b|LLAMA_ARG_MOE_CACHE_MIB=(\d{1,9})\b")


@dataclass(frozen=True)
class LoggedGroup:
    """``type_name``: of the down matrix. ``share``: per cent, as printed."""

    layers: int
    type_name: str
    slots: int
    share: float


@dataclass(frozen=True)
class LoggedDevice:
    """A device's pools; MiB as printed, two decimals."""

    name: str
    cache_mib: float
    host_mib: float
    groups: tuple[LoggedGroup, ...] = ()


@dataclass(frozen=True)
class LoggedClass:
    """Counters of a class of steps at exit."""

    hits: int
    misses: int
    rate: float
    mib: float


@dataclass
class EngineLog:
    """One run's lines. ``classes``: "<=8" and "9-32". ``copied``: for large batches, and MiB."""

    devices: list[LoggedDevice] = field(default_factory=list)
    classes: dict[str, LoggedClass] = field(default_factory=dict)
    copied: tuple[int, float] | None = None
    uncached_layers: list[int] = field(default_factory=list)
    refused: bool = False
    disabled: bool = False
    mib: int | None = None
    runs: int = 0


def read_log(path: str | os.PathLike[str]) -> EngineLog:
    """Read a log file; of several runs in it, the last one that started a cache.

    Raises:
        UsageError: there is no such file. SimlabError: it has none of the lines.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no file {path}; check the name")
    if path.stat().st_size > _LARGEST:
        raise SimlabError(f"{path} is larger than 1 GiB; take the lines with moe_cache out of it")
    with open(path, encoding="utf-8", errors="replace", newline=None) as file:
        found = parse_log(iter(lambda: file.readline(_LONGEST_LINE), ""))
    if not (found.devices or found.classes or found.refused or found.disabled):
        raise SimlabError(
            f"{path} has no line of llama.cpp's MoE cache: run llama-server with -lv 4 and"
            " --moe-cache-mib, and end it (the hit rates are printed at exit)"
        )
    return found


def parse_log(lines: Iterable[str]) -> EngineLog:
    """Find the lines of the last run among others."""
    log = EngineLog()
    mib: int | None = None
    uncached: list[int] = []  # told before the run's first device
    for line in lines:
        flag = _FLAG.search(line)
        if flag:
            mib = int(flag[1] or flag[2])
        if "MoE cache" not in line and "llama_moe_cache" not in line and " slots (" not in line:
            continue
        device = _DEVICE.search(line)
        if device:
            names = [each.name for each in log.devices]
            if log.classes or log.copied or not names or device[1] in names:
                # the first line of a run (--fit tries several): what came before is another's
                log = EngineLog(uncached_layers=uncached, runs=log.runs + 1)
                uncached = []
            log.devices.append(LoggedDevice(device[1], float(device[2]), float(device[3])))
            continue
        group = _GROUP.search(line)
        if group and log.devices:
            last = log.devices[-1]
            each = LoggedGroup(int(group[1]), group[2], int(group[3]), float(group[4]))
            log.devices[-1] = LoggedDevice(
                last.name, last.cache_mib, last.host_mib, (*last.groups, each)
            )
            continue
        counters = _EXIT.search(line)
        if counters:
            name = "<=8" if counters[1] == " <=" else "9-32"
            log.classes[name] = LoggedClass(
                int(counters[2]), int(counters[3]), float(counters[4]), float(counters[5])
            )
        copied = _COPIED.search(line)
        if copied:
            log.copied = int(copied[1]), float(copied[2])
        small = _TOO_SMALL.search(line)
        if small:
            uncached.append(int(small[1]))
        log.refused = log.refused or _REFUSED in line
        log.disabled = log.disabled or _DISABLED in line
    log.mib = mib
    return log
