"""Where a capture stopped, and which of its requests are complete.

Nothing is kept for this but the trace itself. In every decode step each busy lane gets a token, so
a request without a row in the last decode step has ended before it; another is complete only if it
has as many tokens as it may have. The few that may or may not be complete are run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simlab.errors import TraceError, UsageError
from simlab.trace.read import read_trace
from simlab.trace.schema import DECODE, Trace
from simlab.trace.write import STREAM_SUFFIX, recover_trace

if TYPE_CHECKING:
    from simlab.capture.engine import Settings

_KEY = "run settings "


def stream_of(out: Path) -> Path:
    """Where a capture to ``out`` keeps its rows until it ends."""
    return out.with_name(out.name + STREAM_SUFFIX)


def check_target(out: Path, *, resume: bool, force: bool) -> None:
    """Raise UsageError when ``out`` must not be written, before any work is done."""
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder: name a file in it")
    if resume:
        return
    stream = stream_of(out)
    if stream.exists() and not force:
        raise UsageError(
            f"{stream} is left from a capture that did not end: go on with --resume, save it with"
            " 'simlab trace recover', or start anew with --force"
        )
    if out.exists() and not force:
        raise UsageError(
            f"{out} is there already: name another file with --out, go on with --resume if it is"
            " partial, or replace it with --force"
        )
    if force:
        stream.unlink(missing_ok=True)


def key_of(model: str, dtype: str, settings: Settings, prompts: Sequence[Sequence[int]]) -> str:
    """A note that is the same for runs that make the same rows."""
    digest = hashlib.sha256(json.dumps([model, dtype, asdict(settings)]).encode())
    for ids in prompts:
        digest.update(np.array([len(ids), *ids], np.int64).tobytes())
    return _KEY + digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Left:
    """What a capture that stopped has left.

    Attributes:
        trace: all its rows. rows: the numbers of those of complete requests.
        complete: the complete requests. next_step: one more than their last step.
    """

    trace: Trace
    rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    complete: frozenset[int]
    next_step: int


def find_left(out: Path, key: str, lengths: Sequence[int], settings: Settings) -> Left | None:
    """What is left of an earlier run to ``out``; None when there is nothing to go on from.

    The stream becomes the trace ``out`` (partial), unless that is there and has more.

    Args:
        lengths: prompt tokens of every request.

    Raises:
        UsageError: it was made with other settings.
        TraceError: it cannot be read.
    """
    stream = stream_of(out)
    before = _left(out, out, key, lengths, settings) if out.exists() else None
    if stream.exists():
        rescued = out.with_name(f".{out.name}.rescued")
        try:
            recover_trace(stream, rescued)
            later = _left(rescued, stream, key, lengths, settings)
            if before is None or len(later.complete) >= len(before.complete):
                rescued.replace(out)
                before = later
        except TraceError as exc:
            if before is None and "no complete piece" not in str(exc):
                raise
        finally:
            rescued.unlink(missing_ok=True)
    if before is None:
        stream.unlink(missing_ok=True)
        return None
    stream.unlink(missing_ok=True)
    return before


def _left(path: Path, name: Path, key: str, lengths: Sequence[int], settings: Settings) -> Left:
    """What the trace at ``path``, called ``name`` in messages, holds."""
    trace = read_trace(path, cache=False)
    if key not in trace.meta.notes:
        raise UsageError(
            f"{name} was made with another model, other prompts or other settings: repeat those to"
            " go on with it, or name another file with --out"
        )
    requests = np.unique(trace.request)
    new = 0 if settings.teacher_forced else settings.max_new_tokens - 1
    decode = trace.phase == DECODE
    step = trace.step
    last_decode = -1 if step is None or not decode.any() else int(step[decode].max())
    complete = set()
    for request in requests.tolist():
        span = slice(*np.searchsorted(trace.request, [request, request + 1]))
        whole = int(trace.token[span].max()) + 1 == lengths[request] + new
        # one whose prompt was cut short has a later step than the last decode step
        ended = step is not None and int(step[span].max()) < last_decode
        if whole or ended or not trace.meta.partial:
            complete.add(int(request))
    rows = np.flatnonzero(np.isin(trace.request, sorted(complete)))
    return Left(
        trace=trace,
        rows=rows,
        complete=frozenset(complete),
        next_step=0 if step is None or not len(rows) else int(step[rows].max()) + 1,
    )
