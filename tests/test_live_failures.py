"""Live mode when things go wrong: one line, memory given back, what was done kept and marked."""

from __future__ import annotations

import gc
import json
import signal
import weakref
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="live mode needs torch: pip install 'simlab[capture]'")

import torch
from live_cases import live, loaded
from strategies import small_trace

from simlab.cli import main
from simlab.errors import SimlabError
from simlab.live import cells as cells_module
from simlab.live import device as device_module
from simlab.live.bank import Bank
from simlab.live.device import Device, open_device
from simlab.live.engine import Engine
from simlab.live.pool import SlotPool
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.result.store import read_results
from simlab.trace.write import write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of some steps, in two groups."""
    case = next(
        case
        for case in (small_trace(Random(n), max_requests=5) for n in range(1000))
        if len(case.shape.groups) == 2 and len(case.tokens) > 20 and len(case.rows) > 50
        if case.shape.n_expert > 5 and max(map(len, case.shape.groups)) > 1
    )
    path = tmp_path_factory.mktemp("live") / "trace.parquet"
    write_trace(case.trace, path)
    return path


def run(*args: str | Path) -> int:
    sizes = [] if "--slots" in args or "--mib" in args else ["--slots", "75%"]
    return main(["live", *map(str, args), *sizes, "--device", "cpu", "--no-baselines"])


def kinds(path: Path) -> list[str]:
    return [row.kind for row in read_results(path)]


def test_cells_are_written_with_their_kinds_and_notes(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "live.parquet"
    assert run(trace, "--policy", "lru,mix", "--slots", "50%,100%", "--out", out) == 0
    shown = capsys.readouterr().out
    assert "MEASURED on" in shown
    assert "(host memory copy, not PCIe), beside SIMULATED and PREDICTED" in shown
    rows = read_results(out)
    assert [row.kind for row in rows] == ["simulated", "predicted", "measured"] * 4
    for simulated, predicted, measured in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert simulated.ms_per_token is None
        assert predicted.ms_per_token is not None and measured.ms_per_token > 0
        assert simulated.counters == predicted.counters == measured.counters
        assert "host memory copy, not PCIe" in measured.notes
        assert "host memory copy, not PCIe" in measured.provenance["device"]
        assert measured.timing["equal_to_simulation"] is True
        assert not simulated.notes


def test_the_rows_as_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, "--json", "--steps", "5") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in rows] == ["simulated", "predicted", "measured"]
    assert {row["schedule"] for row in rows} == {"lanes, first 5 steps"}
    assert {row["steps"] for row in rows} == {5}


def test_baselines_are_timed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", str(trace), "--device", "cpu", "--json", "--repeat", "2"]) == 0
    timing = json.loads(capsys.readouterr().out)[2]["timing"]
    baselines = timing["baselines_ms_per_token"]
    assert set(baselines) == {"stream-picks", "stream-all", "resident"}
    assert min(baselines.values()) > 0
    assert timing["repeats"] == 2
    assert timing["ms_per_token_low"] <= timing["ms_per_token"] <= timing["ms_per_token_high"]
    # the only cell is not what its prediction was calibrated on
    assert timing["calibrated_on_this"] is False


@pytest.mark.parametrize("fraction", ["0.01", "1"])
def test_a_folded_bank_says_so(
    fraction: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, "--bank-fraction", fraction) == 0
    shown = capsys.readouterr().out
    assert ("folded expert bank: 1 of" in shown) == (fraction == "0.01")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--bank-fraction", "0"], "--bank-fraction must be above 0 and at most 1"),
        (["--policy", "opt"], "knows the future"),
        (["--steps", "0"], "--steps must be 1 or more"),
        (["--slots", "5", "--mib", "1"], "not both"),
        (["--link", "nowhere.json"], "no link profile nowhere.json"),
        (["--repeat", "0"], "--repeat"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--param", "x"], "NAME=VALUE"),
    ],
)
def test_requests_that_cannot_be(
    args: list[str], words: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, *args) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_trace_without_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = small_trace(Random(1))
    path = tmp_path / "trace.parquet"
    bare = case.trace.meta.with_(expert_bytes=())
    write_trace(type(case.trace)(**{**vars(case.trace), "meta": bare}), path)
    assert run(path) == 2
    assert "import it with --expert-bytes" in capsys.readouterr().err


def test_a_bank_that_does_not_fit(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link.json"
    assert main(["probe", "--device", "cpu", "--max-mib", "1", "--out", str(link)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(device_module, "host_memory", lambda: 40)
    out = tmp_path / "live.json"
    assert run(trace, "--link", link, "--out", out) == 1
    err = capsys.readouterr().err
    assert "the expert bank" in err
    assert "take a smaller --bank-fraction" in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_memory_that_the_system_refuses() -> None:
    with open_device("cpu") as device:
        device.free_memory = lambda: None  # type: ignore[method-assign]
        with pytest.raises(SimlabError, match=r"the pool takes .* MiB of memory on .* --slots$"):
            device.empty((2**58,), torch.uint8, "the pool")
        with pytest.raises(SimlabError, match="the bank takes"):
            device.pageable((2**60,), torch.uint8, "the bank")


def refuse_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int) -> None:
    """The method fails from its ``calls``-th call on, as it does when memory is short."""
    real, count = getattr(owner, name), 0

    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count >= calls:
            raise SimlabError("device memory is short; take fewer --slots")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, limited)


def test_memory_that_ends_at_the_second_size_keeps_the_first(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_after(monkeypatch, SlotPool, "__init__", 3)  # two groups a size
    out = tmp_path / "live.json"
    assert run(trace, "--slots", "50%,100%", "--out", out) == 1
    err = capsys.readouterr().err
    assert err.startswith("simlab: error: device memory is short; take fewer --slots")
    assert "(1 of 2 cells are kept)" in err
    assert err.count("\n") == 1
    assert kinds(out) == ["simulated", "predicted", "measured"]


def watched_banks(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """References to the memory of every bank made from now on, which keep none of it."""
    found: list[weakref.ref[Any]] = []
    real = Bank.__init__

    def init(self: Bank, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        found.extend(weakref.ref(t) for g in self.tensors for layer in g for t in layer)

    monkeypatch.setattr(Bank, "__init__", init)
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_given_back(
    fails: bool, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []
    monkeypatch.setattr(Device, "close", lambda self: closed.append(self))
    memory = watched_banks(monkeypatch)
    if fails:
        refuse_after(monkeypatch, SlotPool, "__init__", 2)
    assert run(trace) == int(fails)
    assert len(closed) == 1
    closed.clear()
    gc.collect()
    assert memory
    assert [ref() for ref in memory if ref() is not None] == []


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, run_number: int) -> None:
    """Ctrl-C in the middle of a step of the n-th run."""
    real, runs = Engine._step, 0

    def stepping(self: Engine, number: int, *rest: Any) -> None:
        nonlocal runs
        runs += number == 0
        if runs == run_number and number == step:
            signal.raise_signal(signal.SIGINT)
        real(self, number, *rest)

    monkeypatch.setattr(Engine, "_step", stepping)


def test_ctrl_c_keeps_the_steps_that_were_done(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at(monkeypatch, 7, 2)
    memory = watched_banks(monkeypatch)
    out = tmp_path / "live.json"
    assert run(trace, "--slots", "50%,75%,100%", "--out", out) == 130
    err = capsys.readouterr().err
    assert err == "simlab: interrupted; 2 of 3 cells are kept\n"
    rows = read_results(out)
    assert len(rows) == 6
    for row in rows[3:]:
        assert row.counters.steps == 7
        assert row.schedule == "lanes, first 7 steps"
        assert any(note.startswith("PARTIAL, interrupted: the first 7 of") for note in row.notes)
    assert rows[5].counters == rows[3].counters
    gc.collect()
    assert [ref() for ref in memory if ref() is not None] == []


@pytest.mark.parametrize(("run_number", "kept"), [(1, 0), (2, 1)])
def test_ctrl_c_before_the_first_step_keeps_the_cells_before(
    run_number: int,
    kept: int,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupt_at(monkeypatch, 0, run_number)
    out = tmp_path / "live.json"
    assert run(trace, "--slots", "50%,100%", "--out", out) == 130
    assert out.exists() == bool(kept)
    assert "simlab: interrupted" in capsys.readouterr().err
    if kept:
        assert kinds(out) == ["simulated", "predicted", "measured"]


def test_a_time_limit_marks_the_rows(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "live.json"
    assert run(trace, "--seconds", "1e-9", "--out", out) == 0
    rows = read_results(out)
    assert {row.counters.steps for row in rows} == {1}
    assert all("PARTIAL, the time was up: the first 1 of" in row.notes[0] for row in rows)


def test_bytes_in_the_wrong_slot_make_the_run_invalid(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = SlotPool.upload

    def wrong(self: SlotPool, source: Any, expert: int, row: int, count: int = 1) -> None:
        real(self, source, 0, row, count)

    monkeypatch.setattr(SlotPool, "upload", wrong)
    assert run(trace) == 1
    err = capsys.readouterr().err
    assert "do not hold the bytes of their experts" in err
    assert "this run is invalid" in err


def test_a_lost_copy_makes_the_run_invalid(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "upload", lambda self, *a, **k: None)
    assert run(trace) == 1


def test_a_cell_that_differs_ends_with_exit_code_1_and_its_rows(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(cells_module.Planner):
        def __init__(self, policy: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(loaded("fifo"), *args, **kwargs)

    monkeypatch.setattr(cells_module, "Planner", Other)
    out = tmp_path / "live.json"
    assert run(trace, "--slots", "40%", "--out", out) == 1
    shown, err = capsys.readouterr()
    assert "1 of 1 cells differ from the simulation, the first: lru at " in err
    assert "DIFFERENT, lru" in shown
    assert read_results(out)[2].timing["equal_to_simulation"] is False


def test_other_semantics_are_refused(trace: Path) -> None:
    from simlab.trace.read import read_trace

    replayer = Replayer(read_trace(str(trace)), semantics="per-pick")
    with pytest.raises(SimlabError, match="live runs the llama"):
        live(replayer, [Cell(loaded("lru"), (2, 2))])
