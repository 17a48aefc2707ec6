"""A capture: prompts in, a trace out, written while the model runs.

Every step's rows are on the disk within a second, so no more is lost when the process is killed.
Ctrl-C lets the step end and makes a valid trace of what there is, marked partial. A partial trace,
or the stream of a killed capture, is gone on with by ``resume``.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import simlab
from simlab.capture.engine import Engine, Request, Settings, StepRows
from simlab.capture.hooks import Tap, attach
from simlab.capture.load import Loaded, out_of_memory
from simlab.capture.prompts import Prompt, tokenize
from simlab.capture.resume import Left, check_target, find_left, key_of
from simlab.capture.spool import Spool
from simlab.errors import SimlabError, UsageError
from simlab.trace.arrow import batches_of, take_rows
from simlab.trace.schema import DECODE, PREFILL, TraceMeta
from simlab.trace.write import TraceWriter

#: Told of (tokens computed, tokens that were planned and will not come).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Captured:
    """What a capture did.

    Attributes:
        meta: of the trace at ``path``.
        requests, prompt_tokens, decode_tokens: in the trace, those kept by a resume included.
        run_tokens, seconds: computed by this run, and the time that took without loading.
        kept: requests that a resume found complete.
    """

    path: Path
    meta: TraceMeta
    requests: int
    prompt_tokens: int
    decode_tokens: int
    run_tokens: int
    seconds: float
    kept: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed by this run in a second."""
        return self.run_tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        figures = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "meta"}
        figures["path"] = str(self.path)
        more = {"model": self.meta.model, "partial": self.meta.partial}
        more["content_hash"] = self.meta.content_hash
        return figures | {"tokens_per_second": round(self.tokens_per_second, 3)} | more

    def __str__(self) -> str:
        if self.kept and not self.run_tokens:
            return f"{self.path}: complete already ({self.requests} requests)"
        kept = f", {self.kept} of them kept" if self.kept else ""
        return (
            f"{self.path}: {self.meta.model}, {self.requests} requests{kept},"
            f" {self.prompt_tokens:,} prompt and {self.decode_tokens:,} decode tokens,"
            f" {self.tokens_per_second:,.0f} tokens/s (content {self.meta.content_hash[:16]})"
        )


def capture(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    out: str | Path,
    settings: Settings,
    *,
    weights: bool = False,
    hook: str | None = None,
    max_prompt_tokens: int | None = None,
    source: str = "",
    command: str = "",
    resume: bool = False,
    force: bool = False,
    watch: Callable[[int], Progress] | None = None,
    done: Callable[[Request], None] = lambda request: None,
) -> Captured:
    """Run the model over the prompts and write the picks of every token.

    Args:
        weights: the router weights too. hook: see `simlab.capture.hooks.attach`.
        max_prompt_tokens: longer prompts are cut.
        source: where the prompts are from; command: as typed. Both go into the metadata.
        resume: keep the complete requests of a capture to ``out`` that did not end.
        force: replace ``out``.
        watch: given the number of planned tokens, returns who is told of progress.
        done: takes each request that has ended, with the tokens it generated.

    Raises:
        UsageError: ``out`` is there, the prompts are too long for the model, or `resume` was asked
            for with other settings.
        SimlabError: the model, the memory or the disk failed; what was flushed is kept in a stream
            beside ``out``.
    """
    path = Path(out)
    check_target(path, resume=resume, force=force)
    forced = settings.teacher_forced
    ids = tokenize(prompts, loaded.tokenizer, limit=max_prompt_tokens, answer=not forced)
    new = 0 if forced else settings.max_new_tokens - 1
    check_context(loaded, prompts, ids, new)
    with _threads(loaded.threads), attach(loaded.model, hook=hook, weights=weights) as tap:
        learn_k(loaded, tap)
        key = key_of(f"{loaded.name} {hook or ''}", f"{loaded.dtype} {weights}", settings, ids)
        left = find_left(path, key, [len(i) for i in ids], settings) if resume else None
        if left is not None and not left.trace.meta.partial:
            return _captured(path, left.trace.meta, left, _Count())
        meta = metadata(loaded, tap, prompts, settings, key, source, command, left)
        todo = [(i, t) for i, t in enumerate(ids) if left is None or i not in left.complete]
        tell = watch(sum(len(t) + new for _, t in todo)) if watch else (lambda n, skipped: None)
        # steps of a teacher-forced text are pieces of it, not what is decoded together
        writer = TraceWriter(path, meta, weights=weights, step=not forced)
        count = _Count()

        def emit(rows: StepRows) -> None:
            spool.put(rows)
            count.add(rows)
            tell(len(rows.token), 0)

        def ended(request: Request) -> None:
            tell(0, len(request.prompt) + new - request.fed)
            done(request)

        with (
            _kept_on_failure(writer, loaded, settings),
            writer,
            Spool(writer, tap.moe_layers, step=not forced) as spool,
            stop_on_interrupt() as stop,
        ):
            _append_left(writer, left)
            engine = Engine(
                loaded.model,
                tap,
                settings,
                eos=loaded.eos,
                emit=emit,
                done=ended,
                stop=stop.is_set,
                first_step=left.next_step if left else 0,
            )
            started = time.monotonic()
            try:
                whole = engine.run(todo)
            except KeyboardInterrupt:
                whole = False
            count.seconds = time.monotonic() - started
            spool.close()
            if not whole and not writer.rows_written:
                raise KeyboardInterrupt
            meta = writer.close(partial=not whole)
    return _captured(path, meta, left, count)


class _Count:
    """Tokens that were computed."""

    def __init__(self) -> None:
        self.requests: set[int] = set()
        self.tokens = [0, 0]
        self.seconds = 0.0

    def add(self, rows: StepRows) -> None:
        self.requests.update(np.unique(rows.request).tolist())
        for phase in (PREFILL, DECODE):
            self.tokens[phase] += int((rows.phase == phase).sum())


def _captured(path: Path, meta: TraceMeta, left: Left | None, count: _Count) -> Captured:
    requests, tokens, kept = len(count.requests), list(count.tokens), 0
    if left is not None and len(left.rows):
        request, token = left.trace.request[left.rows], left.trace.token[left.rows]
        new = np.append(True, (np.diff(request) != 0) | (np.diff(token) != 0))
        for phase in (PREFILL, DECODE):
            tokens[phase] += int((left.trace.phase[left.rows][new] == phase).sum())
        kept = len(left.complete)
    return Captured(
        path, meta, requests + kept, tokens[0], tokens[1], sum(count.tokens), count.seconds, kept
    )


def _append_left(writer: TraceWriter, left: Left | None) -> None:
    if left is None or not len(left.rows):
        return
    wanted = np.zeros(left.trace.n_rows, np.bool_)
    wanted[left.rows] = True
    start = 0
    for rows in batches_of(left.trace):
        stop = start + len(rows.request)
        kept = take_rows(rows, np.flatnonzero(wanted[start:stop]))
        writer.append(**kept._asdict())
        start = stop
    writer.flush()


def check_context(
    loaded: Loaded, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], new: int
) -> None:
    """Raise UsageError where a prompt and ``new`` tokens do not fit into the model's context."""
    most = loaded.context
    for prompt, tokens in zip(prompts, ids, strict=True):
        if most is not None and len(tokens) + new > most:
            raise UsageError(
                f"{prompt.name}: {len(tokens)} tokens and {new} more do not fit into the model's"
                f" context of {most}: cut it with --max-prompt-tokens {max(most - new, 1)}"
            )


def learn_k(loaded: Loaded, tap: Tap) -> None:
    """One token, where the configuration does not say how many experts a token gets."""
    if tap.k:
        return
    import torch

    with torch.inference_mode():
        loaded.model(torch.zeros(1, 1, dtype=torch.long, device=loaded.model.device))
    tap.take()


def metadata(
    loaded: Loaded,
    tap: Tap,
    prompts: Sequence[Prompt],
    settings: Settings,
    key: str,
    source: str,
    command: str,
    left: Left | None = None,
) -> TraceMeta:
    """What a trace says of the run that made it; arguments as of `capture`."""
    import platform

    import torch
    import transformers

    config = loaded.model.config
    if settings.teacher_forced:
        phase = "decode" if settings.forced_phase == DECODE else "prefill"
        how = f"teacher-forced: picks over existing text, marked {phase}"
    else:
        how = f"{settings.sampling}, at most {settings.max_new_tokens} new tokens a request"
        how += ", end-of-text ignored" if settings.ignore_eos else ""
    together = "one request at a time"
    if settings.batch > 1:
        together = f"batches of {settings.batch}, padded on the left (padding is not in the trace)"
    if settings.concurrency > 1:
        together = f"continuous batching over {settings.concurrency} lanes"
    notes = [
        how,
        f"{together}; prompts in steps of at most {settings.prefill_chunk} tokens",
        f"{type(loaded.model).__name__}, weights {loaded.dtype}, attention"
        f" {getattr(config, '_attn_implementation', 'unknown')}; tokenizer"
        f" {type(loaded.tokenizer).__name__} of {len(loaded.tokenizer)} tokens",
        key,
    ]
    if left is not None:
        notes.append(f"resumed: {len(left.complete)} requests are of an earlier run")
    return TraceMeta(
        n_expert=tap.n_expert,
        k=tap.k,
        moe_layers=tap.moe_layers,
        model=loaded.name,
        expert_bytes=tap.expert_bytes(),
        kind="captured",
        source=source,
        device=loaded.device_name,
        command=command,
        seed=settings.seed,
        tags={str(i): prompt.tag for i, prompt in enumerate(prompts) if prompt.tag},
        notes=tuple(notes),
        versions={
            "simlab": simlab.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    )


@contextmanager
def _kept_on_failure(writer: TraceWriter, loaded: Loaded, settings: Settings) -> Iterator[None]:
    """Failures as one line that says where the rows are."""
    try:
        yield
    except Exception as exc:
        kept = ""
        if writer.stream_path.exists() and str(writer.stream_path) not in str(exc):
            kept = f"; what was captured is in {writer.stream_path}"
        if kept or writer.stream_path.exists():
            kept += " (go on with --resume, or save it with 'simlab trace recover')"
        if isinstance(exc, SimlabError):
            raise type(exc)(f"{exc}{kept}") from exc
        if out_of_memory(exc):
            less = "a smaller --prefill-chunk, --max-new-tokens or --dtype"
            if settings.lanes > 1:
                less = f"a smaller --{'batch' if settings.batch > 1 else 'concurrency'}, or {less}"
            raise SimlabError(f"out of memory on {loaded.device}: use {less}{kept}") from exc
        reason = " ".join(str(exc).split())[:240]
        raise SimlabError(
            f"{loaded.name} failed with {type(exc).__name__}: {reason}{kept}"
        ) from exc


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """So many threads for torch; None leaves them as they are."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event; a second one interrupts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
