"""Live mode without torch or without a GPU: one line that says what to do."""

from __future__ import annotations

import sys

import pytest

from simlab.cli import main


@pytest.mark.parametrize("command", ["live", "probe"])
def test_without_torch_one_line_says_what_to_install(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([command, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "simlab: error: simlab live needs torch: pip install 'simlab[capture]'\n"


@pytest.mark.parametrize("command", ["live", "probe"])
def test_without_a_gpu_one_line_says_what_else_there_is(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main([command]) == 2
    err = capsys.readouterr().err
    assert "torch finds no CUDA device here; use --device cpu" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:x", "cuda:", ""])
def test_devices_that_are_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="needs torch")
    assert main(["live", "--device", name]) == 2
    assert "--device takes cpu, cuda or cuda:N" in capsys.readouterr().err
