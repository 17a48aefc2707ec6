"""Runs simlab commands in processes of their own, which can be killed: started by a test.

Reads a JSON object a line: ``args`` of the command, ``log`` for what it prints, and optionally
``limit``, the most bytes that a file may have. Prints the process id, then its exit code. Torch is
imported once and every command is a fork of it. In the log a line "wrote N at T" follows every
piece that reached the operating system, and "made N at T" every step that was
computed, N in rows.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from typing import Any

import torch
import transformers

import simlab.capture.run
from simlab.capture.engine import StepRows
from simlab.capture.spool import Spool
from simlab.cli import main
from simlab.trace.write import TraceWriter


def watched() -> None:
    """Make the writer tell what it does."""
    flush, put = TraceWriter.flush, Spool.put
    made = 0

    def say(word: str, rows: int) -> None:
        os.write(1, f"{word} {rows} at {time.monotonic()}\n".encode())

    def telling_flush(self: TraceWriter) -> None:
        with self._lock:
            flush(self)
            say("wrote", self.rows_written)

    def telling_put(self: Spool, rows: StepRows) -> None:
        nonlocal made
        put(self, rows)
        made += rows.experts.shape[0] * rows.experts.shape[1]
        say("made", made)

    TraceWriter.flush, Spool.put = telling_flush, telling_put  # type: ignore[method-assign]


def command(job: dict[str, Any]) -> int:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if "limit" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"], job["limit"]))
    try:
        return main(job["args"])
    except BaseException:
        traceback.print_exc()
        return 99


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert simlab.capture.run and transformers.AutoModelForCausalLM  # imported before forking
    watched()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = command(json.loads(line))
            sys.stdout.flush()
            os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
