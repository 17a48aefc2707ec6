"""The ``simlab`` command: finds the command asked for, and turns every failure into one line.

Commands are loaded when they are run, so that ``simlab --help`` starts at once: the table below
holds what the help prints.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import click

from simlab import __version__
from simlab.cli.invocation import record
from simlab.errors import SimlabError

#: Command -> (module in simlab/cli whose ``command`` it is, its short help).
COMMANDS: dict[str, tuple[str, str]] = {
    "capture": ("capture", "Run a model over prompts and write what its routers picked"),
    "inspect": ("inspect", "Show what is in a trace: shape, reuse, popular experts, cycle"),
    "import": ("import_", "Turn another tool's router picks into a trace"),
    "trace": ("trace", "Recover, slice or merge traces"),
    "synth": ("synth", "Make a synthetic trace: random picks, not those of a real model"),
    "replay": ("replay", "Replay TRACE through a cache and print hits, misses and bytes moved"),
    "curve": (
        "curve",
        "Replay TRACE at every size: hit rate and bytes from 1 slot to all experts",
    ),
    "compare": (
        "compare",
        "Tell whether policy A is better than policy B, with an interval over requests",
    ),
    "tune": ("tune", "Search a policy's parameters on part of a trace, and report on the rest"),
    "explain": ("explain", "Tell why a policy misses: cold, capacity, or its own choice"),
    "frontier": (
        "frontier",
        "Compute the most hits that any policy could have for the bytes that it uploads",
    ),
    "probe": ("probe", "Measure the link to the device: bandwidth and latency by copy size"),
    "live": (
        "live",
        "Run TRACE through a cache with real uploads, and set it beside its simulation",
    ),
    "plan": ("plan", "Tell how many slots a cache budget buys, and the smallest that starts"),
    "check-log": (
        "check_log",
        "Set what llama.cpp logged of its expert cache beside what simlab computes",
    ),
    "advise": (
        "advise",
        "Find the placement of MODEL's experts that is predicted to decode fastest",
    ),
    "calibrate": ("calibrate", "Fit the time model to measured speeds at known hit rates"),
    "report": ("report", "Draw results as one self-contained HTML page"),
    "policies": ("policies", "List and show policies, start a new one, check one"),
}


class _Commands(click.Group):
    """A group that imports a command only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"simlab.cli.{COMMANDS[cmd_name][0]}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # said here, because click would print an empty line of its own first
            _say("simlab: interrupted")
            _leave_threads_behind()
            ctx.exit(130)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every command explains itself: simlab COMMAND --help",
)
@click.version_option(__version__, message="simlab %(version)s")
def cli() -> None:
    """Which expert-cache policy, at which size, moves the fewest bytes for your model and text?"""


def _leave_threads_behind() -> None:
    """End the process now if a thread does not end soon: a policy may loop for ever."""
    deadline = time.monotonic() + 3
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                os._exit(130)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 failed, 2 usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if args is None else args)
    record(arguments)
    try:
        for argument in arguments:
            if not argument.isprintable() and "\\udc" in ascii(argument):
                raise click.UsageError(f"{argument!r} is not valid UTF-8; rename the file")
        # in this mode click returns the code of ctx.exit(), and else what the command returned
        code = cli.main(arguments or ["--help"], prog_name="simlab", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SystemExit:
        raise
    except BaseException as exc:
        if os.environ.get("SIMLAB_DEBUG"):
            import traceback

            traceback.print_exc()
        return _report(exc)


def _report(exc: BaseException) -> int:
    """Say on one line of stderr what went wrong; returns the exit code."""
    if isinstance(exc, BrokenPipeError):
        _drop_stdout()
        return 1
    if isinstance(exc, click.exceptions.NoArgsIsHelpError):
        click.echo(exc.format_message(), err=True)
        return 2
    if isinstance(exc, click.Abort):
        _say("simlab: interrupted")
        return 130
    message, code = _explain(exc)
    _say(f"simlab: error: {message}")
    if isinstance(exc, OSError):
        _drop_stdout()
    return code


def _explain(exc: BaseException) -> tuple[str, int]:
    if isinstance(exc, SimlabError):
        return str(exc), exc.exit_code
    if isinstance(exc, click.UsageError):
        command = exc.ctx.command_path if exc.ctx else "simlab"
        return f"{exc.format_message().rstrip('.')} (see: {command} --help)", exc.exit_code
    if isinstance(exc, click.ClickException):
        return exc.format_message(), exc.exit_code
    if isinstance(exc, MemoryError):
        return "out of memory; take a part of the trace (simlab trace slice) or fewer cells", 1
    if isinstance(exc, OSError) and exc.strerror:
        where = f": {exc.filename}" if exc.filename is not None else ""
        return f"{exc.strerror}{where}{_REMEDIES.get(exc.errno or 0, '')}", 1
    name = type(exc).__name__
    detail = " ".join(str(exc).split())[:300]
    return f"unexpected {name}: {detail} (run with SIMLAB_DEBUG=1 for the traceback)", 1


_REMEDIES = {
    errno.ENOSPC: "; free some space, or write to another disk",
    errno.EDQUOT: "; free some space, or write to another disk",
    errno.EACCES: "; check the permissions, or name another place",
    errno.EPERM: "; check the permissions, or name another place",
    errno.EROFS: "; name a place that can be written to",
    errno.ENOENT: "; check the name",
}


def _say(line: str) -> None:
    """Print to stderr as one line: line breaks become spaces, control characters are shown."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in " ".join(line.splitlines())
    )
    try:
        click.echo(shown, err=True)
    except OSError:
        pass  # stderr is gone too: nobody to tell


def _drop_stdout() -> None:
    """Send what is still buffered nowhere, or the interpreter would fail again while it exits."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass  # stdout is not a file (closed, or replaced in a test)
