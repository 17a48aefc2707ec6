"""Writing piece by piece: order, bounded memory, kills at any moment, full disks, recovery."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from trace_cases import assert_same, random_trace, regular

from simlab.cli import main
from simlab.errors import TraceError, UsageError
from simlab.trace import arrow, write
from simlab.trace.arrow import Rows, batches_of, join_rows, slice_rows, take_rows
from simlab.trace.read import read_trace
from simlab.trace.schema import Trace
from simlab.trace.write import STREAM_SUFFIX, TraceWriter, recover_trace, write_trace


def whole(trace: Trace) -> Rows:
    return join_rows(list(batches_of(trace)))


def append(writer: TraceWriter, rows: Rows) -> None:
    columns: dict[str, Any] = rows._asdict()
    writer.append(**columns)


def writer_of(trace: Trace, path: Path) -> TraceWriter:
    return TraceWriter(
        path, trace.meta, weights=trace.weights is not None, step=trace.step is not None
    )


def stream_of(path: Path) -> Path:
    return path.with_name(path.name + STREAM_SUFFIX)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("shuffled", [False, True])
def test_pieces_make_the_file_that_write_trace_makes(
    seed: int, shuffled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rnd = Random(seed)
    trace = random_trace(rnd)
    rows = whole(trace)
    if shuffled:
        order = np.array(rnd.sample(range(trace.n_rows), trace.n_rows))
        rows = take_rows(rows, order)
    monkeypatch.setattr(write, "BATCH_ROWS", rnd.choice([1, 3, 1000]))
    wanted = write_trace(trace, tmp_path / "whole.parquet")
    with writer_of(trace, tmp_path / "t.parquet") as writer:
        start = 0
        while start < trace.n_rows:
            stop = min(trace.n_rows, start + rnd.randint(0, 5))
            append(writer, slice_rows(rows, start, stop))
            if rnd.random() < 0.3:
                writer.flush()
            start = stop
        assert writer.rows_written == trace.n_rows
        assert not (tmp_path / "t.parquet").exists()
    found = read_trace(tmp_path / "t.parquet", cache=False)
    assert_same(found, trace)
    assert found.meta == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.parquet", "whole.parquet"]


def test_single_numbers_stand_for_all_rows(tmp_path: Path) -> None:
    meta = regular(layers=2).meta
    with TraceWriter(tmp_path / "t.parquet", meta, step=True) as writer:
        writer.append(3, 7, 1, [0, 1], [[1, 2], [3, 4]], step=9)
        writer.append(3, [8, 8], 1, [0, 1], [5, 6, 7], lengths=[1, 2], step=[10, 10])
        stored = writer.close(model="named at the end", notes=("a note",))
    trace = read_trace(tmp_path / "t.parquet", cache=False)
    assert trace.meta == stored
    assert (stored.model, stored.notes) == ("named at the end", ("a note",))
    assert trace.request.tolist() == [3, 3, 3, 3]
    assert trace.token.tolist() == [7, 7, 8, 8]
    assert trace.layer.tolist() == [0, 1, 0, 1]
    assert trace.offsets.tolist() == [0, 2, 4, 5, 7]
    assert trace.experts.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert trace.step is not None
    assert trace.step.tolist() == [9, 9, 10, 10]


BAD_PIECES: dict[str, tuple[dict[str, Any], str]] = {
    "repeated id": ({"experts": [[1, 1]]}, "more than once"),
    "id too large": ({"experts": [[1, 16]]}, "n_expert is 16"),
    "id negative": ({"experts": [[1, -1]]}, "negative"),
    "too many picks": ({"experts": [[1, 2, 3, 4, 5]]}, "k = 4"),
    "unknown layer": ({"layer": [4]}, "MoE layer"),
    "request negative": ({"request": -1}, "request is negative"),
    "phase": ({"phase": 2}, "phase is 2"),
    "text": ({"experts": [["a", "b"]]}, "experts must be numbers"),
    "fractions": ({"experts": [[1.5, 2.0]]}, "not lists of integers"),
    "other numbers of rows": ({"layer": [3, 3]}, "layer has 2 rows, experts 1"),
    "flat without lengths": ({"experts": [1, 2]}, r"\[rows, k\]"),
    "lengths do not add up": ({"experts": [1, 2], "lengths": [1]}, r"\[rows, k\]"),
    "step not announced": ({"step": 1}, "takes the columns"),
    "weights not announced": ({"weights": [[0.5, 0.5]]}, "takes the columns"),
}


@pytest.mark.parametrize("name", BAD_PIECES)
def test_a_bad_piece_is_refused_and_the_rest_stays(name: str, tmp_path: Path) -> None:
    change, words = BAD_PIECES[name]
    good: dict[str, Any] = {"request": 0, "token": 0, "phase": 1, "layer": [3], "experts": [[1, 2]]}
    with TraceWriter(tmp_path / "t.parquet", regular().meta) as writer:
        writer.append(**good)
        with pytest.raises(TraceError, match=words):
            writer.append(**{**good, **change})
        writer.append(**{**good, "token": 1})
    assert read_trace(tmp_path / "t.parquet", cache=False).token.tolist() == [0, 1]


def test_rows_that_come_twice_are_told_at_the_end_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    writer = TraceWriter(path, regular().meta)
    for _ in range(2):
        writer.append(0, 0, 1, [3], [[1, 2]])
    with pytest.raises(TraceError, match=r"two rows for one .*rows are kept in .*\.part\.arrows"):
        writer.close()
    assert [p.name for p in tmp_path.iterdir()] == [stream_of(path).name]


def test_an_exception_keeps_the_rows_and_a_second_run_does_not_overwrite_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.parquet"
    trace = regular()
    with pytest.raises(ZeroDivisionError), writer_of(trace, path) as writer:
        append(writer, slice_rows(whole(trace), 0, 50))
        raise ZeroDivisionError
    with pytest.raises(TraceError, match=r"unfinished run.*simlab trace recover"):
        writer_of(trace, path)
    assert recover_trace(stream_of(path), path).partial
    assert read_trace(path, cache=False).n_rows == 50


def test_nothing_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no rows"), writer_of(regular(), tmp_path / "t.parquet"):
        pass
    with pytest.raises(ZeroDivisionError), writer_of(regular(), tmp_path / "t.parquet"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"folder .*absent does not exist"):
        writer_of(regular(), tmp_path / "absent" / "t.parquet")


def test_rows_reach_the_disk_within_a_second(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with TraceWriter(path, regular().meta) as writer:
        for token in range(3):  # the first goes at once, the others wait
            writer.append(0, token, 1, [3], [[1, 2]])
        deadline = time.monotonic() + 10
        while True:
            recover_trace(stream_of(path), tmp_path / "r.parquet")
            if read_trace(tmp_path / "r.parquet", cache=False).n_rows == 3:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_memory_stays_bounded_for_sorted_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of the stream are converted one by one, never joined to more than two batches."""
    monkeypatch.setattr(write, "BATCH_ROWS", 100)
    largest = 0
    join = arrow.join_rows

    def watched(pieces: list[Rows]) -> Rows:
        nonlocal largest
        joined = join(pieces)
        largest = max(largest, len(joined.request))
        return joined

    monkeypatch.setattr(write, "join_rows", watched)
    trace = regular(10, 50, 4)
    with writer_of(trace, tmp_path / "t.parquet") as writer:
        for start in range(0, 2000, 80):
            append(writer, slice_rows(whole(trace), start, start + 80))
    assert largest < 300
    assert pq.read_metadata(tmp_path / "t.parquet").num_row_groups == 20
    assert_same(read_trace(tmp_path / "t.parquet", cache=False), trace)


def test_memory_stays_bounded_for_requests_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests at a time, token by token: never more than those are joined."""
    monkeypatch.setattr(write, "BATCH_ROWS", 60)
    largest = 0
    join = arrow.join_rows

    def watched(pieces: list[Rows]) -> Rows:
        nonlocal largest
        joined = join(pieces)
        largest = max(largest, len(joined.request))
        return joined

    monkeypatch.setattr(write, "join_rows", watched)
    trace = regular(12, 25, 4)  # requests of 25 tokens, 4 layers
    with writer_of(trace, tmp_path / "t.parquet") as writer:
        for first in range(0, 12, 3):
            for token in range(25):
                now = (trace.request // 3 == first // 3) & (trace.token == token)
                append(writer, arrow.take_rows(whole(trace), np.flatnonzero(now)))
    assert largest <= 3 * 100 + 60
    assert_same(read_trace(tmp_path / "t.parquet", cache=False), trace)


# A capture: prints each token once it is flushed; token t has rows of layers 0 and 1.
CAPTURE = """
import sys
import numpy as np
from simlab.trace.schema import TraceMeta
from simlab.trace.write import TraceWriter
meta = TraceMeta(64, 4, (0, 1), model="m", kind="captured", tags={"0": "prose"}, seed=5)
writer = TraceWriter(sys.argv[1], meta, weights=True)
for token in range(10**6):
    experts = (np.arange(8).reshape(2, 4) * 7 + token) % 64
    writer.append(0, token, 1, [0, 1], experts, weights=experts / 64)
    writer.flush()
    print(token, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_capture_loses_nothing_flushed(seed: int, tmp_path: Path, repo: Path) -> None:
    path = tmp_path / "t.parquet"
    env = {**os.environ, "PYTHONPATH": str(repo)}
    capture = subprocess.Popen(
        [sys.executable, "-c", CAPTURE, str(path)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert capture.stdout is not None
    capture.stdout.readline()
    time.sleep(Random(seed).random() * 0.3)
    capture.send_signal(signal.SIGKILL)
    flushed = [0, *map(int, capture.stdout.read().splitlines())][-1] + 1
    capture.wait()
    assert not path.exists()

    assert main(["trace", "recover", str(stream_of(path))]) == 0
    trace = read_trace(path, cache=False)
    tokens = trace.n_rows // 2
    assert flushed <= tokens <= flushed + 1
    assert trace.token.tolist() == np.repeat(np.arange(tokens), 2).tolist()
    wanted = (np.arange(8) * 7 + np.arange(tokens)[:, None]) % 64
    assert trace.experts.tolist() == wanted.reshape(-1).tolist()
    meta = trace.meta
    assert meta.partial
    assert (meta.model, meta.kind, meta.tags, meta.seed) == ("m", "captured", {"0": "prose"}, 5)
    assert main(["trace", "recover", str(stream_of(path))]) == 2  # the result is there already


def test_recover_from_every_kind_of_cut(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    trace = replace(regular(2, 10, 3), step=np.arange(60, dtype=np.int32))
    ends = []
    with pytest.raises(ZeroDivisionError), writer_of(trace, path) as writer:
        for start in range(0, 60, 10):
            append(writer, slice_rows(whole(trace), start, start + 10))
            writer.flush()
            ends.append(stream_of(path).stat().st_size)
        raise ZeroDivisionError
    stream = stream_of(path).read_bytes()
    cut = tmp_path / "cut.arrows"
    for place in range(0, len(stream), 61):
        cut.write_bytes(stream[:place])
        complete = sum(end <= place for end in ends)
        if complete:
            recover_trace(cut, path)
            assert read_trace(path, cache=False).n_rows == 10 * complete
        else:
            with pytest.raises(TraceError, match=r"not an unfinished capture|no complete piece"):
                recover_trace(cut, path)


def test_recover_refuses_what_is_no_stream_of_a_trace(tmp_path: Path) -> None:
    import pyarrow as pa

    with pytest.raises(TraceError, match="No such file"):
        recover_trace(tmp_path / "absent", tmp_path / "t.parquet")
    with pytest.raises(TraceError, match="cannot read"):
        recover_trace(tmp_path, tmp_path / "t.parquet")
    other = tmp_path / "other.arrows"
    other.write_bytes(b"some text")
    with pytest.raises(TraceError, match="not an unfinished capture"):
        recover_trace(other, tmp_path / "t.parquet")
    table = pa.table({"a": [1]})
    with pa.ipc.new_stream(other, table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(TraceError, match="not of a simlab trace"):
        recover_trace(other, tmp_path / "t.parquet")
    assert main(["trace", "recover", str(other)]) == 2  # no name for the result
    assert not (tmp_path / "t.parquet").exists()


# Files may not grow beyond 40,000 bytes: what a full disk does, without one.
FULL_DISK = """
import resource, sys
import numpy as np
from simlab.errors import TraceError
from simlab.trace.schema import TraceMeta
from simlab.trace.write import TraceWriter, write_trace
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
writer = TraceWriter(sys.argv[1], TraceMeta(64, 4, (0, 1)))
rng = np.random.default_rng(0)
try:
    for token in range(5000):
        writer.append(0, token, 1, [0, 1], np.sort(rng.permutation(64)[:8].reshape(2, 4)))
        if token % 100 == 99:
            writer.flush()
            good = token + 1
except TraceError as exc:
    print(good, exc)
else:
    print("no failure")
"""


@pytest.mark.skipif(os.name != "posix", reason="limits of file sizes")
def test_a_full_disk_spoils_nothing_that_was_flushed(tmp_path: Path, repo: Path) -> None:
    path = tmp_path / "t.parquet"
    env = {**os.environ, "PYTHONPATH": str(repo)}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], env=env, capture_output=True, text=True
    )
    good, message = done.stdout.split(" ", 1)
    assert done.stderr == ""
    assert "cannot write" in message
    assert "File too large" in message
    recover_trace(stream_of(path), path)
    assert read_trace(path, cache=False).n_rows == 2 * int(good)
