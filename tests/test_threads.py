"""CPython before 3.11.8 cannot make syntax trees in two threads at once; only the main one does.

(SystemError: AST constructor recursion depth mismatch, once in thousands of runs.)
"""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from typing import Any

import pytest
from lab_cases import sticky_trace

from simlab.cli import main
from simlab.policy import sources
from simlab.trace import decoded
from simlab.trace.write import write_trace


@pytest.fixture
def parsing(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that made a syntax tree, as loaders of policies and readers of .npy files do."""
    sources._imported_names.cache_clear()
    seen: list[threading.Thread] = []
    parse = ast.parse

    def watched(*args: Any, **options: Any) -> ast.AST:
        seen.append(threading.current_thread())
        return parse(*args, **options)

    monkeypatch.setattr(ast, "parse", watched)
    return seen


@pytest.mark.parametrize(
    "line",
    [
        "replay {} --policy lru,opt --slots 12,50% --jobs 2",
        "curve {} --policy lru,opt,random --slots 12,24 --jobs 2",
        "compare lru opt {} --slots 12 --jobs 2",
        "explain {} --policy lru --slots 12 --jobs 2",
        "frontier {} --policy lru --slots 12 --mu 0,1 --jobs 2",
        "tune {} --policy lrfu --budget 4 --slots 12 --jobs 2",
    ],
    ids=lambda line: line.split()[0],
)
def test_commands(
    line: str,
    parsing: list[threading.Thread],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[str] = []
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched)
    path = tmp_path / "t.parquet"
    # of its own, so that its entry in the decoded cache is written beside the work
    write_trace(sticky_trace(seed=len(line)), path)
    assert main(line.format(path).split()) == 0, capsys.readouterr().err
    decoded.finish()
    assert {name.split("-")[0] for name in started} >= {"simlab decoded", "ThreadPoolExecutor"}
    assert set(parsing) == {threading.main_thread()}
