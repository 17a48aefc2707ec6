"""`simlab live --model`: what it prints and writes, and what ends it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="live mode needs torch: pip install 'simlab[capture]'")
pytest.importorskip("transformers", reason="running a model needs transformers")

from capture_cases import save_model
from live_model_cases import at_step, one_thread  # noqa: F401 (for all tests of the module)

from simlab.cli import main
from simlab.live.pool import SlotPool
from simlab.trace.read import read_trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("live")
    text = root / "prompts.jsonl"
    text.write_text("\n".join(json.dumps({"prompt": c * 9}) for c in "abc"))
    return SimpleNamespace(model=str(save_model(root / "model")), prompts=str(text))


def live(folder: Any, *options: str) -> int:
    args = ["live", "--model", folder.model, "--prompts", folder.prompts, "--device", "cpu"]
    return main([*args, "--max-new-tokens", "4", *options])


def test_the_command_prints_what_was_held_to_what(folder: Any, capsys: Any) -> None:
    assert (
        live(folder, "--slots", "4,50%", "--policy", "lru,lfu-decay", "--concurrency", "1,2") == 0
    )
    out, err = capsys.readouterr()
    assert err == ""
    assert "host memory copy, not PCIe" in out and "needs an engine change" in out
    assert out.count("every bit") == 8 and " NO" not in out
    lanes = [line.replace("*", "").split()[1] for line in out.splitlines() if "every bit" in line]
    assert sorted(lanes) == ["1"] * 4 + ["2"] * 4


def test_the_command_writes_rows(folder: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "rows.json"
    assert live(folder, "--json", "--out", str(out)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in rows] == ["simulated", "measured"]
    assert [row["schedule"] for row in rows] == ["recorded", "recorded"]
    simulated, measured = rows
    assert all(measured[n] == simulated[n] for n in ("hits", "misses", "bytes_moved", "lookups"))
    timing = measured["timing"]
    assert timing["comparison"]["identical"] and timing["equal_to_simulation"]
    assert timing["device_note"] == "host memory copy, not PCIe" in measured["notes"]
    assert measured["ms_per_token"] > 0 and simulated["ms_per_token"] is None
    assert json.loads(out.read_text()) == rows


def test_the_command_fails_when_a_check_does(
    folder: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SlotPool.upload

    def wrong(self: SlotPool, source: Any, expert: int, row: int, count: int = 1) -> None:
        real(self, source, 0, row, count)

    monkeypatch.setattr(SlotPool, "upload", wrong)
    assert live(folder) == 1
    out, err = capsys.readouterr()
    assert "DIVERGES, lru at" in out and "request 0, token " in out
    assert err.startswith("simlab: error: 1 of 1 cells, the first: not bit-identical")
    assert err.count("\n") == 1


def test_the_command_is_interrupted(
    folder: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGINT))
    trace = tmp_path / "t.parquet"
    assert live(folder, "--save-trace", str(trace), "--no-compare") == 130
    out, err = capsys.readouterr()
    assert "PARTIAL, lru at" in out and "the 4 steps before it count" in out
    assert err.startswith("simlab: interrupted; 1 of 1 cells are kept") and err.count("\n") == 1
    assert read_trace(trace).meta.partial


def test_memory_that_runs_out_is_one_line(
    folder: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise MemoryError

    at_step(monkeypatch, 3, full)
    assert live(folder) == 1
    out, err = capsys.readouterr()
    assert "PARTIAL" in out and "out of memory on cpu" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "demo", "--link", "x"], "--link goes with TRACE"),
        (["--model", "demo", "--steps", "3"], "--steps goes with TRACE"),
        (["some.parquet", "--model", "demo"], "TRACE or --model, not both"),
        (["--prompts", "x"], "--prompts goes with --model"),
        (["--path", "fast"], "--path goes with --model"),
        (["--model", "demo", "--concurrency", "0", "--device", "cpu"], "--concurrency"),
        (["--model", "./nowhere", "--device", "cpu"], "there is no such folder"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], said: str, capsys: Any) -> None:
    assert main(["live", *options]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_the_demo_model(tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning")
    args = ["live", "--model", "demo", "--prompts", str(text), "--max-new-tokens", "4"]
    args += ["--device", "cpu", "--policy", "lru,mix,lfu-decay", "--slots", "8,50%"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny demo model") and out.count("every bit") == 6
