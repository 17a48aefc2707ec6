"""``simlab trace``: recover, slice and merge trace files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from simlab.errors import UsageError

if TYPE_CHECKING:
    from simlab.trace.schema import Trace


@click.group("trace")
def command() -> None:
    """Recover, slice or merge traces."""


@command.command()
@click.argument("stream", type=click.Path(path_type=Path))
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    help="Trace to write; default: STREAM without its .part.arrows.",
)
def recover(stream: Path, out: Path | None) -> None:
    """Save what an interrupted capture wrote.

    STREAM is the .part.arrows file beside the trace it was to become. The trace is
    marked as partial. STREAM is left as it is.
    """
    from simlab.trace.write import STREAM_SUFFIX, recover_trace

    if out is None:
        if not stream.name.endswith(STREAM_SUFFIX):
            raise UsageError(
                f"{stream} does not end in {STREAM_SUFFIX}: name the result with --out"
            )
        out = stream.with_name(stream.name.removesuffix(STREAM_SUFFIX))
        if out.exists():
            raise UsageError(f"{out} is there already: name another file with --out")
    meta = recover_trace(stream, out)
    click.echo(f"{out}: recovered, marked partial (content {meta.content_hash[:16]})")


@command.command("slice")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="Trace to write.")
@click.option("--requests", metavar="SPEC", help="Requests to keep, such as 0-9,12.")
@click.option("--tokens", metavar="SPEC", help="Token positions to keep.")
@click.option("--layers", metavar="SPEC", help="Layers to keep.")
@click.option("--phase", type=click.Choice(["prefill", "decode"]), help="Keep one phase only.")
def slice_(
    trace: Path,
    out: Path,
    requests: str | None,
    tokens: str | None,
    layers: str | None,
    phase: str | None,
) -> None:
    """Keep the rows that meet all conditions."""
    from simlab.trace.edit import slice_trace
    from simlab.trace.read import read_trace
    from simlab.trace.schema import DECODE, PREFILL

    wanted = {
        "requests": _numbers("--requests", requests),
        "tokens": _numbers("--tokens", tokens),
        "layers": _numbers("--layers", layers),
    }
    kept = None if phase is None else {"prefill": PREFILL, "decode": DECODE}[phase]
    _write(slice_trace(read_trace(trace), **wanted, phase=kept), out)


@command.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="Trace to write.")
def merge(traces: tuple[Path, ...], out: Path) -> None:
    """Put traces of one model together.

    They follow one another; requests are numbered anew.
    """
    from simlab.trace.edit import merge_traces
    from simlab.trace.read import read_trace

    _write(merge_traces([read_trace(path) for path in traces]), out)


def _write(trace: Trace, out: Path) -> None:
    from dataclasses import replace

    from simlab.cli.invocation import command_line
    from simlab.trace.write import write_trace

    said = trace.meta.with_(command=command_line())
    meta = write_trace(replace(trace, meta=said), out)
    click.echo(f"{out}: {trace.n_rows:,} rows, {trace.n_picks:,} picks")
    click.echo(meta.notes[-1])


#: Numbers above this are no request, token or layer of any trace.
_MOST = 2**31 - 1


def _numbers(option: str, spec: str | None) -> list[range] | None:
    """``0-9,12`` as ranges."""
    if spec is None:
        return None
    found = []
    for part in spec.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"{option} {spec!r}: write numbers and ranges, such as 0-9,12")
        span = range(int(first), int(last or first) + 1)
        if not span or span[-1] > _MOST:
            raise UsageError(f"{option} {spec!r}: {part.strip()} is not an ascending range")
        found.append(span)
    return found
