"""Captures that end before their time: killed, interrupted, out of memory, out of disk, resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="capturing needs torch: pip install 'simlab[capture]'")
pytest.importorskip("transformers", reason="capturing needs transformers")

from capture_cases import save_model

from simlab.cli import main
from simlab.trace.read import read_trace
from simlab.trace.schema import Trace
from simlab.trace.write import STREAM_SUFFIX

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and forks")


class Child:
    """Starts captures in processes of their own, see capture_child.py."""

    def __init__(self, repo: Path, folder: Path) -> None:
        self.folder = folder
        self.model = save_model(folder / "model")
        texts = [{"prompt": c * 20, "tag": "prose"} for c in "abcdef"]
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text("\n".join(map(json.dumps, texts)))
        self.process = subprocess.Popen(
            [sys.executable, str(repo / "tests" / "capture_child.py")],
            env={**os.environ, "PYTHONPATH": str(repo)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, out: Path, *options: str, **job: Any) -> int:
        args = ["capture", "--model", str(self.model), "--prompts", str(self.prompts)]
        args += ["--out", str(out), "--temperature", "1", "--device", "cpu", *options]
        job |= {"args": args, "log": str(self.log(out))}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._number()

    def end(self) -> int:
        return self._number()

    def log(self, out: Path) -> Path:
        return out.with_suffix(".log")

    def rows(self, out: Path, word: str, before: float = float("inf")) -> int:
        """Rows that were ``made`` or ``wrote`` (before a time)."""
        found = re.findall(rf"{word} (\d+) at ([\d.]+)\n", self.log(out).read_text())
        return max([int(n) for n, at in found if float(at) <= before], default=0)

    def wait_for_rows(self, out: Path) -> None:
        deadline = time.monotonic() + 120
        while not (self.log(out).exists() and self.rows(out, "wrote")):
            assert time.monotonic() < deadline, self.log(out).read_text()
            time.sleep(0.02)

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def child(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    made = Child(repo, tmp_path_factory.mktemp("captures"))
    yield made
    assert made.process.stdin is not None
    made.process.stdin.close()
    made.process.wait(60)


Rows = dict[tuple[int, int], list[list[int]]]


def rows_of(trace: Trace) -> Rows:
    """(request, token) -> picks of all three layers."""
    assert trace.layer.tolist() == [0, 1, 2] * (trace.n_rows // 3)
    picks = trace.experts.reshape(-1, 3, 4).tolist()
    places = zip(trace.request[::3].tolist(), trace.token[::3].tolist(), strict=True)
    return dict(zip(places, picks, strict=True))


def common(some: Rows, others: Rows) -> int:
    """Number of tokens in both; they must have the same picks."""
    both = some.keys() & others.keys()
    assert all(some[place] == others[place] for place in both)
    return len(both)


#: rows of a killed capture by way of running, to compare the next one with
seen: dict[str, Rows] = {}


def kill_once(child: Child, seed: int, out: Path) -> None:
    rnd = Random(seed)
    lanes = ["--concurrency", "3"] if seed % 2 else []
    pid = child.start(out, "--max-new-tokens", "3000", "--ignore-eos", *lanes)
    child.wait_for_rows(out)
    time.sleep(rnd.random() * 2)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert child.end() == -signal.SIGKILL
    assert not out.exists()

    stream = out.with_name(out.name + STREAM_SUFFIX)
    assert main(["trace", "recover", str(stream)]) == 0
    trace = read_trace(out, cache=False)
    # everything that was flushed, and everything older than a second (and what a busy machine adds)
    assert trace.n_rows >= child.rows(out, "wrote") > 0
    assert trace.n_rows >= child.rows(out, "made", before=killed - 1.5)
    assert trace.n_rows <= child.rows(out, "made") + 3 * 3  # the last step may not have told
    meta = trace.meta
    assert meta.partial
    assert (meta.kind, meta.n_expert, meta.k, meta.seed) == ("captured", 16, 4, 0)
    assert meta.tags == {str(i): "prose" for i in range(6)}
    rows = rows_of(trace)
    requests = {request for request, _ in rows}
    for request in requests:  # no token is missing in between
        assert (request, len([r for r, _ in rows if r == request]) - 1) in rows
    before = seen.setdefault(str(lanes), rows)
    assert common(rows, before) == min(len(rows), len(before))
    stream.unlink()


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_capture_loses_nothing_flushed(seed: int, child: Child, tmp_path: Path) -> None:
    kill_once(child, seed, tmp_path / "t.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_twenty_killed_captures(seed: int, child: Child, tmp_path: Path) -> None:
    kill_once(child, seed, tmp_path / "t.parquet")


def kept_by_resume(trace: Trace) -> int:
    """Number of requests that a resumed capture did not compute again."""
    (note,) = [n for n in trace.meta.notes if n.startswith("resumed: ")]
    return int(note.split()[1])


def columns(trace: Trace) -> list[list[int]]:
    return [
        getattr(trace, name).tolist()
        for name in ("request", "token", "phase", "layer", "offsets", "experts", "step")
    ]


@pytest.fixture(scope="module")
def whole(child: Child) -> Trace:
    """An uninterrupted capture."""
    out = child.folder / "whole.parquet"
    child.start(out, "--max-new-tokens", "60")
    assert child.end() == 0, child.log(out).read_text()
    return read_trace(out, cache=False)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_capture_is_resumed(
    how: signal.Signals,
    child: Child,
    whole: Trace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "t.parquet"
    options = ["--max-new-tokens", "60"]
    pid = child.start(out, *options)
    child.wait_for_rows(out)
    deadline = time.monotonic() + 120
    third = int((whole.request < 2).sum()) + 10  # rows when the third request is on its way
    while child.rows(out, "made") < third:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, how)
    code = child.end()
    stream = out.with_name(out.name + STREAM_SUFFIX)
    if how == signal.SIGINT:
        assert code == 130
        text = child.log(out).read_text()
        assert text.count("simlab: interrupted; the trace is marked partial") == 1
        assert "Traceback" not in text
        partial = read_trace(out, cache=False)
        assert partial.meta.partial
        assert common(rows_of(partial), rows_of(whole)) == partial.n_rows // 3 < whole.n_rows // 3
    else:
        assert code == -signal.SIGKILL
    assert stream.exists() == (how == signal.SIGKILL)

    # other settings are another capture; a plain start does not overwrite
    child.start(out, "--max-new-tokens", "40", "--resume")
    assert child.end() == 2
    assert "made with another model, other prompts or other settings" in child.log(out).read_text()
    assert main(["capture", "--out", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err

    child.start(out, *options, "--resume")
    assert child.end() == 0, child.log(out).read_text()
    trace = read_trace(out, cache=False)
    assert columns(trace) == columns(whole)
    assert trace.meta.content_hash == whole.meta.content_hash
    assert not trace.meta.partial
    # those kept were not computed again
    kept = kept_by_resume(trace)
    assert kept >= (2 if how == signal.SIGINT else 1)
    steps = len(set(whole.step[whole.request >= kept].tolist()))
    assert len(re.findall("made ", child.log(out).read_text())) == steps
    child.start(out, *options, "--resume")
    assert child.end() == 0
    assert "complete already (6 requests)" in child.log(out).read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"t.parquet", "t.log"}


def test_lanes_are_resumed(child: Child, whole: Trace, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    options = ["--max-new-tokens", "60", "--concurrency", "2"]
    pid = child.start(out, *options)
    child.wait_for_rows(out)
    deadline = time.monotonic() + 120
    while child.rows(out, "made") < 0.6 * whole.n_rows:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    child.end()
    child.start(out, *options, "--resume")
    assert child.end() == 0, child.log(out).read_text()
    trace = read_trace(out, cache=False)
    assert 1 <= kept_by_resume(trace) <= 5
    rows = rows_of(trace)
    # a float32 model may pick otherwise in a batch, but prompts are computed alone
    assert {r for r, _ in rows} == set(range(6))
    assert all(rows[place] == picks for place, picks in rows_of(whole).items() if place[1] < 20)
    for request in range(6):  # no token is missing or twice
        tokens = [token for r, token in rows if r == request]
        assert tokens == list(range(len(tokens)))
    # in no step is a request twice, nor are there more than two
    assert trace.step is not None
    decode = trace.phase == 1
    both = list(zip(trace.step[decode][::3].tolist(), trace.request[decode][::3], strict=True))
    assert len(set(both)) == len(both)
    assert np.unique([step for step, _ in both], return_counts=True)[1].max() == 2


def test_a_full_disk(child: Child, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    child.start(out, "--max-new-tokens", "3000", "--ignore-eos", limit=40_000)
    assert child.end() == 1
    text = child.log(out).read_text()
    line = re.findall("simlab: error: .*", text)
    assert len(line) == 1
    assert "cannot write" in line[0]
    assert "File too large" in line[0]
    assert "--resume" in line[0]
    assert "Traceback" not in text
    stream = out.with_name(out.name + STREAM_SUFFIX)
    assert main(["trace", "recover", str(stream)]) == 0
    assert read_trace(out, cache=False).n_rows >= child.rows(out, "wrote")
