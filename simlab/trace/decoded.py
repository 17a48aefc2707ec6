"""The decoded cache: a trace's arrays as plain .npy files, mapped into memory on opening.

Decoding, checking and hashing a large trace takes about a second, mapping its arrays a few
hundredths. An entry is a folder, written beside the caller's work under another name and renamed,
so that several processes may make or use it at once. Nothing here raises: without a usable cache
the trace is decoded again.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.cache_folder import cache_folder
from simlab.errors import TraceError
from simlab.trace.hash import content_hash
from simlab.trace.schema import Trace, TraceMeta

_VERSION = 2
#: Most bytes of all entries together; the least recently used ones go first.
LIMIT_BYTES = 8 << 30
_ABANDONED_SECONDS = 3600.0
_BLOCK = 1 << 16
_ARRAYS = ("request", "token", "phase", "layer", "offsets", "experts", "weights", "step")
_FAILURES = (OSError, ValueError, EOFError, KeyError, TypeError, MemoryError, TraceError)
#: Entries being written by this process.
_saving: dict[str, threading.Thread] = {}


def load(key: str) -> Trace | None:
    """The cached trace of a key, its arrays copy-on-write maps of files; None if there is none.

    An entry whose files do not have the recorded shapes and checksums is removed.
    """
    finish(key)
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
        arrays = {name: _mapped(entry, name) for name in manifest["arrays"]}
        for name, (size, checksum) in manifest["arrays"].items():
            if len(arrays[name]) != size or _checksum(arrays[name]) != checksum:
                raise ValueError(f"{name} is damaged")
        meta = TraceMeta.from_json(json.dumps(manifest["meta"]))
        trace = _trace_of(meta, arrays, int(manifest["row_picks"]))
    except _FAILURES:
        shutil.rmtree(entry, ignore_errors=True)
        return None
    with contextlib.suppress(OSError):
        os.utime(entry / "manifest.json")
    return trace


def save_later(key: str, trace: Trace) -> None:
    """Start `save` beside the caller's work; `load`, `finish` and the end of the process wait."""
    thread = threading.Thread(target=save, args=(key, trace), name="simlab decoded", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread to be had, or the interpreter is ending
        return
    _saving[key] = thread


def finish(key: str | None = None) -> None:
    """Wait until the entry of a key, or every entry, is written."""
    for name in [key] if key is not None else list(_saving):
        thread = _saving.pop(name, None)
        if thread is not None:
            thread.join()


@atexit.register
def _finish_at_exit() -> None:
    with contextlib.suppress(KeyboardInterrupt):  # an unfinished entry is no entry
        finish()


def save(key: str, trace: Trace, *, limit: int = LIMIT_BYTES) -> None:
    """Put a trace into the cache; a full disk or an unwritable folder leaves no entry.

    Args:
        key: a plain file name that stands for the file and its state.
        trace: with its content hash; what was written must still have it, since the caller may
            change the arrays meanwhile.
        limit: most bytes of all entries; a larger trace is not cached.
    """
    folder = cache_folder("decoded")
    if folder is None:
        return
    made: Path | None = None
    try:
        row_picks = _row_picks(trace.offsets)
        arrays: dict[str, npt.NDArray[Any]] = {
            name: getattr(trace, name)
            for name in _ARRAYS
            if getattr(trace, name) is not None and not (name == "offsets" and row_picks)
        }
        size = sum(array.nbytes for array in arrays.values())
        if size > limit:
            return
        made = Path(tempfile.mkdtemp(dir=folder, prefix=".new-"))
        for name, array in arrays.items():
            np.save(made / f"{name}.npy", array, allow_pickle=False)
        written = {name: _written(made, name, array) for name, array in arrays.items()}
        if content_hash(_trace_of(trace.meta, written, row_picks)) != trace.meta.content_hash:
            return
        manifest = {
            "version": _VERSION,
            "meta": json.loads(trace.meta.to_json()),
            "row_picks": row_picks,
            "arrays": {name: (len(array), _checksum(array)) for name, array in written.items()},
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


def _mapped(entry: Path, name: str) -> npt.NDArray[Any]:
    """An array of an entry, copy-on-write: compiled code takes it as one freshly decoded."""
    array: npt.NDArray[Any] = np.load(entry / f"{name}.npy", mmap_mode="c", allow_pickle=False)
    return array.view(np.ndarray)


def _written(entry: Path, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What ``array`` became on disk.

    Without reading the file's header, which numpy parses as Python: CPython before 3.11.8 cannot
    parse in two threads at once (SystemError: AST constructor recursion depth mismatch), and the
    caller loads policies meanwhile.
    """
    file = entry / f"{name}.npy"
    header = file.stat().st_size - array.nbytes
    return np.memmap(file, array.dtype, "c", header, array.shape).view(np.ndarray)


def _trace_of(meta: TraceMeta, arrays: dict[str, npt.NDArray[Any]], row_picks: int) -> Trace:
    if "offsets" not in arrays:
        offsets = np.arange(0, len(arrays["experts"]) + 1, row_picks, dtype=np.int64)
        arrays = {**arrays, "offsets": offsets}
    return Trace(meta=meta, **arrays)


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
