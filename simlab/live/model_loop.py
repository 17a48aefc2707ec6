"""A model with its experts in a slot pool: real text, real uploads, held to the model without one.

First the model runs whole and what it computes is kept. Then its expert weights leave it for host
memory, the same prompts run again with the experts served from a slot pool, and every output is
held to the first run. The picks are captured on the way; their trace is replayed and must tell the
same hits, misses and bytes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simlab.capture.engine import Engine, Request, Settings, StepRows
from simlab.capture.hooks import Tap, attach
from simlab.capture.load import Loaded, out_of_memory
from simlab.capture.prompts import Prompt, tokenize
from simlab.capture.run import Progress, check_context, learn_k, metadata, stop_on_interrupt
from simlab.capture.spool import Spool
from simlab.errors import SimlabError, UsageError
from simlab.live.compare import Comparing, Comparison, Recording, check_room, watched
from simlab.live.device import Device
from simlab.live.experts import ExpertLayer, implementation, take_apart, taken_out
from simlab.live.forward import PATHS, check_fast, fast, reference
from simlab.live.model_check import Check, check_run
from simlab.live.pooled import PooledExperts, hosted
from simlab.model.layout import layout_of
from simlab.policy.loader import Policy
from simlab.replay.cell import Cell
from simlab.replay.run import ON_DECLINE, Replayer
from simlab.replay.sizes import Size
from simlab.trace.read import read_trace
from simlab.trace.schema import TraceMeta
from simlab.trace.write import TraceWriter

#: Staging rows of the reference path: streamed experts that are copied together.
_WAVE = 8


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        policy, params, size: of the cache. path: one of PATHS.
        on_decline: "stream" or "cpu". seed: of policies that draw random numbers.
        compare: run the whole model first and hold the run to it.
        max_prompt_tokens: longer prompts are cut.
    """

    policy: Policy
    size: Size
    params: Mapping[str, float] = field(default_factory=dict)
    path: str = "reference"
    on_decline: str = "stream"
    seed: int = 0
    compare: bool = True
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise UsageError(f"--path must be one of {', '.join(PATHS)}, not {self.path!r}")
        if self.on_decline not in ON_DECLINE:
            raise UsageError(f"--on-decline must be one of {', '.join(ON_DECLINE)}")


@dataclass(frozen=True)
class ModelRun:
    """What a run found.

    Attributes:
        check: the live run beside the replay of its trace.
        comparison: beside the model without a pool, or None.
        path: reference or fast. device: in words. device_note: to be printed beside figures.
        partial: why the run ended early; empty for a whole one. interrupted: it was Ctrl-C.
        seconds: of the run from the pool; seconds_whole: of the one before, or None.
        pool_bytes, staging_bytes: on the device. bank_bytes: experts in host memory.
        notes: what a reader of the figures must know.
    """

    check: Check
    comparison: Comparison | None
    path: str
    device: str
    device_note: str
    partial: str
    interrupted: bool
    seconds: float
    seconds_whole: float | None
    pool_bytes: int
    staging_bytes: int
    bank_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> str:
        """Why the run does not hold, in one line; empty if it does."""
        if not self.check.equal:
            return f"the replay of the captured trace differs: {self.check.difference}"
        if self.path == "reference" and self.comparison and not self.comparison.identical:
            return f"not bit-identical to the model without a pool: {self.comparison.why}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        measured = self.check.measured
        return {
            "measured": measured.to_dict() if measured else None,
            "simulated": self.check.simulated.to_dict(),
            "counters_equal": self.check.equal,
            "difference": self.check.difference,
            "comparison": self.comparison.to_dict() if self.comparison else None,
            "path": self.path,
            "device": self.device,
            "device_note": self.device_note,
            "partial": self.partial,
            "seconds": round(self.seconds, 3),
            "seconds_whole": self.seconds_whole and round(self.seconds_whole, 3),
            "pool_bytes": self.pool_bytes,
            "staging_bytes": self.staging_bytes,
            "bank_bytes": self.bank_bytes,
            "notes": list(self.notes),
            "failed": self.failed,
        }


def run_model(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    device: Device,
    settings: Settings,
    options: Options,
    *,
    source: str = "",
    command: str = "",
    save_trace: str | Path | None = None,
    watch: Callable[[int], Progress] | None = None,
) -> ModelRun:
    """Run a model from a slot pool.

    The model is whole again afterwards, however the run ends.

    Args:
        loaded: on ``device``. settings: one lane or several with ``concurrency``.
        save_trace: where the captured trace is kept; a partial run's is marked so.
        watch: as of `simlab.capture.run.capture`.

    Raises:
        UsageError: an option does not go with this model.
        SimlabError: the model cannot be taken apart, memory is short, or a policy failed.
        KeyboardInterrupt: before the first step from the pool was over.
    """
    if settings.batch > 1:
        raise UsageError("--batch pads prompts, and padding has no row in a trace: --concurrency")
    if save_trace is not None and Path(save_trace).exists():
        raise UsageError(f"--save-trace {save_trace} is there already: name another file")
    if options.on_decline == "cpu" and options.path == "reference" and device.kind != "cpu":
        raise UsageError(
            "--on-decline cpu computes on another processor, which is not bit-identical; use"
            " --path fast"
        )
    ids = tokenize(prompts, loaded.tokenizer, limit=options.max_prompt_tokens)
    check_context(loaded, prompts, ids, settings.max_new_tokens - 1)
    with attach(loaded.model) as tap:
        learn_k(loaded, tap)
        layers = take_apart(loaded.model, tap.sites)
        if options.path == "fast":
            check_fast(loaded.model, layers)
        meta = metadata(loaded, tap, prompts, settings, "", source, command)
        run = _Run(loaded, tap, layers, meta, ids, settings, options, device, watch)
        with (
            implementation(layers, PATHS[options.path]),
            tempfile.TemporaryDirectory(prefix="simlab-") as folder,
        ):
            recording = run.whole() if options.compare else None
            path = Path(save_trace or Path(folder) / "live.parquet")
            pooled = run.pooled(recording, path)
            return run.verdict(pooled, path, command)


class _Run:
    """One run and what it needs from step to step."""

    def __init__(
        self,
        loaded: Loaded,
        tap: Tap,
        layers: list[ExpertLayer],
        meta: TraceMeta,
        ids: list[list[int]],
        settings: Settings,
        options: Options,
        device: Device,
        watch: Callable[[int], Progress] | None,
    ) -> None:
        self.loaded, self.tap, self.layers, self.meta = loaded, tap, layers, meta
        self.ids, self.settings, self.options, self.device = ids, settings, options, device
        self.layout = layout_of(meta)
        slots, self.notes = options.size.slots(self.layout)
        self.slots = tuple(slots)
        tokens = sum(map(len, ids)) + len(ids) * (settings.max_new_tokens - 1)
        self.tokens = tokens
        planned = tokens * (2 if options.compare else 1)
        self._tell = watch(planned) if watch else (lambda done, skipped: None)
        self.texts: dict[int, list[int]] = {}
        self.partial, self.interrupted = "", False
        self.seconds = 0.0
        self.seconds_whole: float | None = None
        self.comparing: Comparing | None = None

    def engine(
        self, emit: Callable[[StepRows], None], texts: dict[int, list[int]], **others: Any
    ) -> Engine:
        def told(rows: StepRows) -> None:
            emit(rows)
            self._tell(len(rows.token), 0)

        def done(request: Request) -> None:
            texts[request.index] = list(request.new)
            new = self.settings.max_new_tokens - 1
            self._tell(0, len(request.prompt) + new - request.fed)

        return Engine(
            self.loaded.model, self.tap, self.settings, eos=self.loaded.eos, emit=told, done=done,
            **others,
        )  # fmt: skip

    def whole(self) -> Recording:
        """The model as it is, and what it computes."""
        config = self.loaded.model.config.get_text_config()
        widths = (config.hidden_size, config.vocab_size, self.loaded.model.dtype.itemsize)
        check_room(self.tokens, self.tokens, len(self.layers), *widths)
        kept = Recording()

        def emit(rows: StepRows) -> None:
            kept.rows.append((rows.request, rows.token))

        started = time.monotonic()
        try:
            with watched(self.loaded.model, self.tap.sites, kept.steps.append):
                self.engine(emit, kept.texts).run(enumerate(self.ids))
        except Exception as exc:
            raise exc if isinstance(exc, SimlabError) else _failure(self.loaded, exc) from exc
        self.seconds_whole = time.monotonic() - started
        return kept

    def pooled(self, recording: Recording | None, path: Path) -> PooledExperts:
        """The same prompts with the experts in a slot pool, until they end or something ends them.

        Returns:
            What was planned and copied; its memory is given back already.
        """
        model, options = self.loaded.model, self.options
        compared: Any = nullcontext()
        if recording is not None:
            self.comparing = Comparing(recording, self.tap.moe_layers)
            compared = watched(model, self.tap.sites, self.comparing.take)
        widest = max(layer.site.n_expert for layer in self.layers)
        with (
            hosted(self.layers, self.device),
            closing(
                PooledExperts(
                    self.device, self.layers, self.layout, options.policy, self.slots,
                    params=options.params, seed=options.seed, on_decline=options.on_decline,
                    staging=widest if options.path == "fast" else min(_WAVE, widest),
                )
            ) as pooled,
            taken_out(self.layers, (fast if options.path == "fast" else reference)(pooled)),
            _steps(model, pooled),
            compared,
            TraceWriter(path, self.meta, step=True) as writer,
            Spool(writer, self.tap.moe_layers, step=True) as spool,
            stop_on_interrupt() as stop,
        ):  # fmt: skip
            engine = self.engine(spool.put, self.texts, stop=stop.is_set)
            started = time.monotonic()
            try:
                if not engine.run(enumerate(self.ids)):
                    self.partial, self.interrupted = "interrupted", True
            except KeyboardInterrupt:
                self.partial, self.interrupted = "interrupted", True
            except Exception as exc:
                if isinstance(exc, SimlabError):
                    raise
                if not out_of_memory(exc):
                    raise _failure(self.loaded, exc) from exc
                self.partial = str(_failure(self.loaded, exc))
            self.seconds = time.monotonic() - started
            spool.close()
            if self.partial and not writer.rows_written:
                raise KeyboardInterrupt if self.interrupted else SimlabError(self.partial)
            writer.close(partial=bool(self.partial))
        return pooled

    def verdict(self, pooled: PooledExperts, path: Path, command: str) -> ModelRun:
        """Hold what was planned and copied to the replay of the trace at ``path``."""
        trace = read_trace(path, cache=False)
        assert trace.step is not None
        steps = int(trace.step.max()) + 1
        options = self.options
        replayer = Replayer(
            trace, layout=self.layout, schedule="recorded", on_decline=options.on_decline,
            seed=options.seed, ubatch=self.settings.prefill_chunk, trace_name=path.name,
            command=command,
        )  # fmt: skip
        cell = Cell(options.policy, self.slots, params=options.params, notes=tuple(self.notes))
        log = [seen for seen in pooled.log if seen.step < steps]
        check = check_run(replayer, cell, log, pooled.bytes_in(steps), time.time() - self.seconds)
        comparison = None
        if self.comparing is not None:
            comparison = self.comparing.result(self.texts, partial=bool(self.partial))
        return ModelRun(
            check=check,
            comparison=comparison,
            path=options.path,
            device=self.loaded.device_name,
            device_note=self.device.note,
            partial=self.partial,
            interrupted=self.interrupted,
            seconds=self.seconds,
            seconds_whole=self.seconds_whole,
            pool_bytes=pooled.pool_bytes,
            staging_bytes=pooled.staging_bytes,
            bank_bytes=sum(p.nbytes for layer in self.layers for p in layer.parameters),
            notes=tuple(self.notes),
        )


@contextmanager
def _steps(model: Any, pooled: PooledExperts) -> Iterator[None]:
    """Tell the pool of every forward pass that begins."""

    def begin(_m: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids: Any = kwargs.get("input_ids", args[0] if args else None)
        pooled.begin_step(ids.numel())

    handle = model.register_forward_pre_hook(begin, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _failure(loaded: Loaded, exc: Exception) -> SimlabError:
    """What a library raised, in one line."""
    if out_of_memory(exc):
        return SimlabError(
            f"out of memory on {loaded.device}: use fewer --slots, or a smaller --concurrency,"
            " --prefill-chunk or --max-new-tokens"
        )
    reason = " ".join(str(exc).split())[:240]
    return SimlabError(f"{loaded.name} failed with {type(exc).__name__}: {reason}")
