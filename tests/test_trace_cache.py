"""The decoded cache: used, rebuilt when damaged, done without when it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_cases import assert_same, make, regular

from simlab.cache_folder import cache_folder
from simlab.trace import decoded, read
from simlab.trace.hash import content_hash
from simlab.trace.read import read_trace
from simlab.trace.schema import Trace
from simlab.trace.write import write_trace


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the test's own."""
    monkeypatch.setenv("SIMLAB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoded"


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were decoded, in order."""
    seen: list[Path] = []
    decode = read._decode

    def watched(path: Path, *rest: object) -> Trace:
        seen.append(path)
        return decode(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(read, "_decode", watched)
    return seen


def entries(folder: Path) -> list[Path]:
    decoded.finish()
    return sorted(folder.iterdir()) if folder.is_dir() else []


def test_the_second_opening_maps_the_arrays(
    folder: Path, decodes: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "t.parquet"
    trace = regular()
    write_trace(trace, path)
    first, second = read_trace(path), read_trace(path)
    assert decodes == [path]
    assert first.meta == second.meta
    for found in (first, second):
        assert_same(found, trace)
        # compiled code is specialised on this: cached and decoded traces must not differ
        assert all(array.flags.writeable for array in (found.experts, found.offsets))
        assert type(found.experts) is np.ndarray
    second.experts[:] = 0  # copy-on-write: the entry is not touched
    assert_same(read_trace(path), trace)
    assert decodes == [path]
    assert len(entries(folder)) == 1
    assert "offsets.npy" not in os.listdir(entries(folder)[0])
    read_trace(path, cache=False)
    assert decodes == [path, path]


def test_a_changed_file_and_other_arguments_are_other_entries(
    folder: Path, decodes: list[Path], tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    from simlab.trace.arrow import to_arrow

    path = tmp_path / "t.parquet"
    ragged = make([(0, 0, 1, 0, [1, 2]), (0, 1, 1, 0, [3])])
    for number, trace in enumerate((regular(seed=1), regular(seed=2), ragged), 1):
        write_trace(trace, path)
        for _ in range(2):
            assert_same(read_trace(path), trace)
        assert len(decodes) == number
    pq.write_table(to_arrow(regular()).drop_columns(["phase"]), path)
    options: list[dict[str, int]] = [
        {"n_expert": 16},
        {"n_expert": 32},
        {"n_expert": 16, "phase": 0},
    ]
    for _ in range(2):
        for option in options:
            trace = read_trace(path, **option)
            assert trace.meta.n_expert == option["n_expert"]
            assert set(trace.phase.tolist()) == {option.get("phase", 1)}
    assert len(decodes) == 6


def test_a_damaged_entry_is_rebuilt(folder: Path, decodes: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    trace = regular()
    write_trace(trace, path)
    read_trace(path)
    (entry,) = entries(folder)
    names = sorted(os.listdir(entry))
    assert "manifest.json" in names
    count = 1
    for name in names:
        file = entry / name
        for damage in ("absent", "empty", "cut", "zeroed", "longer"):
            content = file.read_bytes()
            if damage == "absent":
                file.unlink()
            else:
                file.write_bytes(
                    {
                        "empty": b"",
                        "cut": content[:-1],
                        "zeroed": content[:-16] + bytes(16),
                        "longer": content.replace(b"(240,)", b"(241,)") + bytes(8),
                    }[damage]
                )
                if file.read_bytes() == content:
                    continue
            assert_same(read_trace(path), trace)
            # bytes after the end of an array are never looked at
            count += damage != "longer" or len(decodes) > count
            assert len(decodes) == count, (name, damage)
            assert len(entries(folder)) == 1


def test_without_a_usable_folder_traces_open_all_the_same(
    tmp_path: Path, decodes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    write_trace(regular(), path)
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none", "\0"):
        monkeypatch.setattr(os, "environ", {**os.environ, "SIMLAB_CACHE_DIR": str(place)})
        assert cache_folder("decoded") is None
        assert_same(read_trace(path), regular())
    assert len(decodes) == 4


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / "decoded").mkdir(parents=True)
    (tmp_path / "cache" / "decoded").chmod(0o500)
    monkeypatch.setenv("SIMLAB_CACHE_DIR", str(tmp_path / "cache"))
    assert cache_folder("decoded") is None


def test_the_folder_is_where_the_user_s_caches_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SIMLAB_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache_folder("decoded") == tmp_path / "simlab" / "decoded"
    monkeypatch.setenv("SIMLAB_CACHE_DIR", str(tmp_path / "named"))
    assert cache_folder("compiled") == tmp_path / "named" / "compiled"
    assert (tmp_path / "named" / "compiled").is_dir()


def test_an_entry_holds_what_the_file_holds_whatever_the_caller_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    write_trace(regular(), path)
    begin = threading.Event()
    save = decoded.save

    def late(*args: Any) -> None:
        begin.wait()
        save(*args)

    monkeypatch.setattr(decoded, "save", late)
    trace = read_trace(path)
    trace.experts[:] = trace.experts[::-1].copy()
    begin.set()
    assert entries(folder) == []
    assert_same(read_trace(path), regular())
    assert len(entries(folder)) == 1


def test_a_full_disk_leaves_no_entry(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    write_trace(regular(), path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert_same(read_trace(path), regular())
    assert entries(folder) == []


def test_the_least_recently_used_entries_make_room(folder: Path, tmp_path: Path) -> None:
    plain = regular()
    decoded.save("first", plain)
    assert entries(folder) == []  # without a hash nobody can tell what was written
    trace = replace(plain, meta=plain.meta.with_(content_hash=content_hash(plain)))
    decoded.save("first", trace)
    size = sum(file.stat().st_size for file in (folder / "first").iterdir())
    limit = 3 * size + size // 2
    decoded.save("second", trace, limit=limit)
    decoded.save("third", trace, limit=limit)
    for age, name in enumerate(("third", "second", "first")):
        os.utime(folder / name / "manifest.json", (1000 - age, 1000 - age))
    assert decoded.load("first") is not None  # used: it is the youngest now
    abandoned = folder / ".new-killed"
    abandoned.mkdir()
    os.utime(abandoned, (1000, 1000))
    (folder / ".new-at-work").mkdir()
    decoded.save("fourth", trace, limit=limit)
    assert [entry.name for entry in entries(folder)] == [
        ".new-at-work", "first", "fourth", "third",
    ]  # fmt: skip
    decoded.save("too large", trace, limit=1000)
    assert decoded.load("too large") is None
    assert decoded.load("fourth") is not None


OPEN = """
import sys
from simlab.trace.read import read_trace
print(read_trace(sys.argv[1]).meta.content_hash, int(read_trace(sys.argv[1]).experts.sum()))
"""


def test_processes_share_an_empty_folder(folder: Path, tmp_path: Path, repo: Path) -> None:
    path = tmp_path / "t.parquet"
    trace = regular(20, 50, 8)
    write_trace(trace, path)
    env = {**os.environ, "PYTHONPATH": str(repo)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN, str(path)], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]  # fmt: skip
    outputs = {process.communicate() for process in running}
    wanted = f"{read_trace(path).meta.content_hash} {int(trace.experts.sum())}\n"
    assert outputs == {(wanted, "")}
    assert len(entries(folder)) == 1
