"""The decoded cache: a trace's arrays as plain .npy files, mapped into memory on opening.

Decoding, checking and hashing a large trace takes about a second, mapping its arrays a few
hundredths. An entry is a folder, made under another name and renamed, so that several processes may
make or use it at once. Nothing here raises: without a usable cache the trace is decoded again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.cache_folder import cache_folder
from simlab.errors import TraceError
from simlab.trace.schema import Trace, TraceMeta

_VERSION = 2
#: Most bytes of all entries together; the least recently used ones go first.
LIMIT_BYTES = 8 << 30
_ABANDONED_SECONDS = 3600.0
_BLOCK = 1 << 16
_ARRAYS = ("request", "token", "phase", "layer", "offsets", "experts", "weights", "step")
_FAILURES = (OSError, ValueError, EOFError, KeyError, TypeError, MemoryError, TraceError)


def load(key: str) -> Trace | None:
    """The cached trace of a key, its arrays copy-on-write maps of files; None if there is none.

    An entry whose files do not have the recorded shapes and checksums is removed.
    """
    folder = cache_folder("decoded")
    if folder is None or not (folder / key).is_dir():
        return None
    entry = folder / key
    try:
        seal, text = (entry / "manifest.json").read_text().split("\n", 1)
        if hashlib.sha256(text.encode()).hexdigest() != seal:
            raise ValueError("the manifest is damaged")
        manifest = json.loads(text)
        if manifest["version"] != _VERSION:
            raise ValueError("another version")
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, (size, checksum) in manifest["arrays"].items():
            # copy-on-write: the same array type for compiled code as freshly decoded ones
            array = np.load(entry / f"{name}.npy", mmap_mode="c", allow_pickle=False)
            arrays[name] = array.view(np.ndarray)
            if len(array) != size or _checksum(arrays[name]) != checksum:
                raise ValueError(f"{name} is damaged")
        if "offsets" not in arrays:
            picks, k = len(arrays["experts"]), int(manifest["row_picks"])
            arrays["offsets"] = np.arange(0, picks + 1, k, dtype=np.int64)
        trace = Trace(meta=TraceMeta.from_json(json.dumps(manifest["meta"])), **arrays)
    except _FAILURES:
        shutil.rmtree(entry, ignore_errors=True)
        return None
    with contextlib.suppress(OSError):
        os.utime(entry / "manifest.json")
    return trace


def save(key: str, trace: Trace, pool: Executor, *, limit: int = LIMIT_BYTES) -> None:
    """Put a trace into the cache; a full disk or an unwritable folder leaves no entry.

    Args:
        key: a plain file name that stands for the file and its state.
        pool: writes the arrays side by side.
        limit: most bytes of all entries; a larger trace is not cached.
    """
    folder = cache_folder("decoded")
    if folder is None:
        return
    row_picks = _row_picks(trace.offsets)
    arrays: dict[str, npt.NDArray[Any]] = {
        name: getattr(trace, name)
        for name in _ARRAYS
        if getattr(trace, name) is not None and not (name == "offsets" and row_picks)
    }
    size = sum(array.nbytes for array in arrays.values())
    if size > limit:
        return
    made: Path | None = None
    try:
        made = Path(tempfile.mkdtemp(dir=folder, prefix=".new-"))
        target = made

        def write(name: str) -> tuple[int, int]:
            np.save(target / f"{name}.npy", arrays[name], allow_pickle=False)
            return len(arrays[name]), _checksum(arrays[name])

        order = sorted(arrays, key=lambda name: -arrays[name].nbytes)
        manifest = {
            "version": _VERSION,
            "meta": json.loads(trace.meta.to_json()),
            "row_picks": row_picks,
            "arrays": dict(zip(order, pool.map(write, order), strict=True)),
        }
        text = json.dumps(manifest)
        seal = hashlib.sha256(text.encode()).hexdigest()
        (made / "manifest.json").write_text(f"{seal}\n{text}")
        _make_room(folder, limit - size)
        os.rename(made, folder / key)
        made = None
    except _FAILURES:
        pass  # no room, or another process was first
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _row_picks(offsets: npt.NDArray[np.int64]) -> int:
    """Picks of each row when all have as many: the offsets then need no file. 0 otherwise."""
    first = int(offsets[1])
    blocks = (offsets[i : i + _BLOCK + 1] for i in range(0, len(offsets) - 1, _BLOCK))
    return first if all((np.diff(block) == first).all() for block in blocks) else 0


def _checksum(array: npt.NDArray[Any]) -> int:
    """Sum of the 64-bit words and of the bytes after them: finds torn pages at memory speed."""
    raw = array.view(np.uint8)
    whole = len(raw) & ~7
    words = int(raw[:whole].view(np.uint64).sum(dtype=np.uint64))
    return words ^ int(raw[whole:].sum(dtype=np.uint64))


def _make_room(folder: Path, room: int) -> None:
    """Remove the least recently used entries until the others fit in ``room`` bytes."""
    entries: list[tuple[float, int, Path]] = []
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if entry.name.startswith(".new-"):
                # left by a killed process, unless it is young
                if time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(entry, ignore_errors=True)
                continue
            size = sum(file.stat().st_size for file in entry.iterdir())
            entries.append(((entry / "manifest.json").stat().st_mtime, size, entry))
    total = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries):
        if total <= room:
            break
        shutil.rmtree(entry, ignore_errors=True)
        total -= size
