"""The command line as a whole: starting fast, help, and every failure as one line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import click
import pytest

from simlab import __version__
from simlab.cli import COMMANDS, _Commands, main
from simlab.errors import SimlabError, TraceError, UsageError

HEAVY = ["numpy", "numba", "polars", "pandas", "pyarrow", "plotly", "rich", "torch"]


def load(name: str) -> click.Command:
    return import_module(f"simlab.cli.{COMMANDS[name][0]}").command


def run(*args: str, repo: Path, **kwargs) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(repo)}
    command = [sys.executable, "-m", "simlab", *args]
    return subprocess.run(command, env=env, text=True, stderr=subprocess.PIPE, **kwargs)


@pytest.mark.parametrize(
    "args", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_imports_nothing_heavy(args: list[str], repo: Path) -> None:
    code = (
        "import json, sys; from simlab.cli import main\n"
        f"code = main({args!r})\n"
        f"print(json.dumps([code, sorted(set(sys.modules) & set({HEAVY!r}))]))"
    )
    env = {**os.environ, "PYTHONPATH": str(repo)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []], done.stderr


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, (_, text) in COMMANDS.items():
        assert f" {name} {text}" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_listed_help_is_the_command_s_own(name: str) -> None:
    assert load(name).get_short_help_str(limit=200).rstrip(".") == COMMANDS[name][1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str, repo: Path) -> None:
    pages = [repo / "README.md", *(repo / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    command = load(name)
    assert f"simlab {name}" in text
    if isinstance(command, click.Group):
        for sub in command.list_commands(click.Context(command)):
            assert f"simlab {name} {sub}" in text, f"simlab {name} {sub} is in no page of docs/"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"simlab {__version__}\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["repaly"], "did you mean 'replay'?"),
        (["xyzzy"], "there are capture, inspect"),
        (["--vresion"], "--version"),
        (["replay", "--no-such-option"], "simlab replay --help"),
    ],
)
def test_usage_errors_are_one_line(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("simlab: error: ")
    assert words in err
    assert err.count("\n") == 1


class PanicException(BaseException):
    """Stands for what a compiled library raises when it gives up."""


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (
            SimlabError("a.parquet is damaged\nsomewhere"),
            1,
            "error: a.parquet is damaged somewhere",
        ),
        (TraceError("cut short"), 1, "error: cut short"),
        (UsageError("slots must be positive"), 2, "error: slots must be positive"),
        (SimlabError("bad name \x1b[2J"), 1, "error: bad name \\x1b[2J"),
        (click.BadParameter("not a number"), 2, "not a number (see: simlab inspect --help)"),
        (KeyboardInterrupt(), 130, "simlab: interrupted"),
        (MemoryError(), 1, "error: out of memory; "),
        (OSError(errno.ENOSPC, "No space left", "x.html"), 1, "No space left: x.html; free some"),
        (PermissionError(errno.EACCES, "Permission denied", "y"), 1, "denied: y; check the perm"),
        (
            ZeroDivisionError("by\nzero"),
            1,
            "unexpected ZeroDivisionError: by zero (run with SIMLAB_",
        ),
        (PanicException("index"), 1, "unexpected PanicException: index"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_failure_is_one_line(
    raised: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.pass_context
    def callback(ctx: click.Context) -> None:
        if isinstance(raised, click.UsageError):
            raised.ctx = ctx
        raise raised

    command = click.Command("inspect", callback=callback)
    monkeypatch.setattr(_Commands, "get_command", lambda self, ctx, name: command)
    assert main(["inspect"]) == code
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self, ctx, name):
        raise ZeroDivisionError

    monkeypatch.setattr(_Commands, "get_command", broken)
    monkeypatch.setenv("SIMLAB_DEBUG", "1")
    assert main(["inspect"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_closed_pipe_is_not_an_error(repo: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = run("--help", repo=repo, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_under_stdout_is_one_line(repo: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run("--help", repo=repo, stdout=full)
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM is POSIX")
def test_sigterm_leaves_nothing_half_written(tmp_path: Path, repo: Path) -> None:
    command = [sys.executable, "-m", "simlab", "synth", "ar", "--out", "big.parquet"]
    environment = {**os.environ, "PYTHONPATH": str(repo)}
    process = subprocess.Popen(
        [*command, "--requests", "64", "--decode-tokens", "20000"],
        cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    stream = tmp_path / "big.parquet.part.arrows"
    while process.poll() is None and not (stream.exists() and stream.stat().st_size > 10_000):
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate()
    assert (process.returncode, err) == (143, "simlab: interrupted\n")
    assert list(tmp_path.iterdir()) == []
