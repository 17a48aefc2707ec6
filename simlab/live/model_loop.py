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
from dataclasses import dataclass, field, replace
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
from simlab.live.model_check import Check, check_run, step_times
from simlab.live.pooled import PooledExperts, hosted, placed
from simlab.live.provenance import provenance
from simlab.model.layout import layout_of
from simlab.policy.loader import Policy
from simlab.replay.cell import Cell
from simlab.replay.run import ON_DECLINE, Replayer
from simlab.replay.sizes import Size
from simlab.result.schema import Result
from simlab.trace.read import read_trace
from simlab.trace.schema import TraceMeta
from simlab.trace.write import TraceWriter

#: Staging rows of the reference path: streamed experts that are copied together.
_WAVE = 8


@dataclass(frozen=True)
class ModelCell:
    """A cache to run the model with, and how many requests decode together."""

    policy: Policy
    size: Size
    concurrency: int = 1
    params: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """How cells are run.

    Attributes:
        path: one of PATHS. on_decline: "stream" or "cpu".
        policy_seed: for policies that draw random numbers.
        compare: run the whole model first and hold the run to it.
        max_prompt_tokens: longer prompts are cut.
        save_trace: where the captured trace is kept; a partial run's is marked so.
    """

    path: str = "reference"
    on_decline: str = "stream"
    policy_seed: int = 0
    compare: bool = True
    max_prompt_tokens: int | None = None
    save_trace: Path | None = None

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise UsageError(f"--path must be one of {', '.join(PATHS)}, not {self.path!r}")
        if self.on_decline not in ON_DECLINE:
            raise UsageError(f"--on-decline must be one of {', '.join(ON_DECLINE)}")
        if self.save_trace is not None and self.save_trace.exists():
            raise UsageError(f"--save-trace {self.save_trace} is there already: name another file")


@dataclass(frozen=True)
class ModelRun:
    """What became of a cell.

    Attributes:
        check: the live run beside the replay of its trace; its rows.
        comparison: the run beside the model without a pool, or None.
        partial: why the run ended early; empty for a whole one. interrupted: it was Ctrl-C.
    """

    check: Check
    comparison: Comparison | None
    path: str
    partial: str
    interrupted: bool

    @property
    def rows(self) -> list[Result]:
        """The simulated row and the measured one."""
        return [row for row in (self.check.simulated, self.check.measured) if row is not None]

    @property
    def failed(self) -> str:
        """Why the run does not hold, in one line; empty if it does."""
        if not self.check.equal:
            return f"the replay of the captured trace differs: {self.check.difference}"
        if self.path == "reference" and self.comparison and not self.comparison.identical:
            return f"not bit-identical to the model without a pool: {self.comparison.why}"
        return ""


def run_model(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    device: Device,
    settings: Settings,
    cells: Sequence[ModelCell],
    options: Options,
    *,
    source: str = "",
    command: str = "",
    watch: Callable[[int], Progress] | None = None,
) -> Iterator[ModelRun]:
    """Run a model from a slot pool, cell by cell; one that ends early is the last.

    The model is whole again afterwards, however a run ends.

    Args:
        loaded: on ``device``, or without ``compare`` in host memory.
        settings: of the engine; each cell brings its concurrency.
        watch: as of `simlab.capture.run.capture`.

    Raises:
        UsageError: an option does not go with this model.
        SimlabError: the model cannot be taken apart, memory is short, or a policy failed.
        KeyboardInterrupt: before the first step from a pool was over.
    """
    if settings.batch > 1:
        raise UsageError("--batch pads prompts, and padding has no row in a trace: --concurrency")
    if options.save_trace is not None and len(cells) > 1:
        raise UsageError("--save-trace keeps the trace of one cell: name one policy and one size")
    if options.on_decline == "cpu" and options.path == "reference" and device.kind != "cpu":
        raise UsageError(
            "--on-decline cpu computes on another processor, which is not bit-identical; use"
            " --path fast"
        )
    for cell in cells:
        if cell.policy.reads_future:
            raise UsageError(
                f"policy {cell.policy.name} knows the future; live runs what an engine could run"
            )
    ids = tokenize(prompts, loaded.tokenizer, limit=options.max_prompt_tokens)
    check_context(loaded, prompts, ids, settings.max_new_tokens - 1)
    with attach(loaded.model) as tap:
        learn_k(loaded, tap)
        layers = take_apart(loaded.model, tap.sites)
        if options.path == "fast":
            check_fast(loaded.model, layers)
        steps = sum(map(len, ids)) + len(ids) * (settings.max_new_tokens - 1)
        levels = len({cell.concurrency for cell in cells}) if options.compare else 0
        tell = watch(steps * (len(cells) + levels)) if watch else (lambda done, skipped: None)
        whole: tuple[int, Recording] | None = None
        for cell in cells:
            now = replace(settings, concurrency=cell.concurrency)
            meta = metadata(loaded, tap, prompts, now, "", source, command)
            run = _Run(loaded, tap, layers, meta, ids, now, cell, options, device, tell)
            with (
                implementation(layers, PATHS[options.path]),
                tempfile.TemporaryDirectory(prefix="simlab-") as folder,
            ):
                if options.compare and (whole is None or whole[0] != cell.concurrency):
                    whole = None  # its memory is the next one's
                    whole = (cell.concurrency, run.whole())
                recording = whole[1] if whole is not None else None
                path = options.save_trace or Path(folder) / "live.parquet"
                found = run.verdict(run.pooled(recording, path), recording, path, command)
            yield found
            if found.partial:
                return


class _Run:
    """One cell and what it needs from step to step."""

    def __init__(
        self,
        loaded: Loaded,
        tap: Tap,
        layers: list[ExpertLayer],
        meta: TraceMeta,
        ids: list[list[int]],
        settings: Settings,
        cell: ModelCell,
        options: Options,
        device: Device,
        tell: Progress,
    ) -> None:
        self.loaded, self.tap, self.layers, self.meta = loaded, tap, layers, meta
        self.ids, self.settings, self.cell, self.options = ids, settings, cell, options
        self.device, self._tell = device, tell
        self.layout = layout_of(meta)
        slots, self.notes = cell.size.slots(self.layout)
        self.slots = tuple(slots)
        self.texts: dict[int, list[int]] = {}
        self.ms: list[float] = []
        self.partial, self.interrupted = "", False
        self.comparing: Comparing | None = None
        self.started = time.time()

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
        tokens = sum(map(len, self.ids)) + len(self.ids) * self.settings.max_new_tokens
        widths = (config.hidden_size, config.vocab_size, self.loaded.model.dtype.itemsize)
        check_room(tokens, len(self.layers), *widths)
        kept = Recording()

        def emit(rows: StepRows) -> None:
            kept.rows.append((rows.request, rows.token))

        model = self.loaded.model
        try:
            with (
                _timed(model, self.device, kept.ms),
                watched(model, self.tap.sites, kept.steps.append),
            ):
                self.engine(emit, kept.texts).run(enumerate(self.ids))
        except Exception as exc:
            raise exc if isinstance(exc, SimlabError) else _failure(self.loaded, exc) from exc
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
                    self.device, self.layers, self.layout, self.cell.policy, self.slots,
                    params=self.cell.params, seed=options.policy_seed,
                    on_decline=options.on_decline,
                    staging=widest if options.path == "fast" else min(_WAVE, widest),
                )
            ) as pooled,
            taken_out(self.layers, (fast if options.path == "fast" else reference)(pooled)),
            placed(model, self.device),
            _timed(model, self.device, self.ms, pooled.begin_step),
            compared,
            TraceWriter(path, self.meta, step=True) as writer,
            Spool(writer, self.tap.moe_layers, step=True) as spool,
            stop_on_interrupt() as stop,
        ):  # fmt: skip
            engine = self.engine(spool.put, self.texts, stop=stop.is_set)
            try:
                if not engine.run(enumerate(self.ids)):
                    self.partial, self.interrupted = "interrupted", True
            except KeyboardInterrupt:
                self.partial, self.interrupted = "interrupted", True
            except Exception as exc:
                if isinstance(exc, SimlabError):
                    raise
                failure = _failure(self.loaded, exc)
                if not out_of_memory(exc):
                    raise failure from exc
                self.partial = str(failure)
            spool.close()
            if self.partial and not writer.rows_written:
                raise KeyboardInterrupt if self.interrupted else SimlabError(self.partial)
            writer.close(partial=bool(self.partial))
        return pooled

    def verdict(
        self, pooled: PooledExperts, recording: Recording | None, path: Path, command: str
    ) -> ModelRun:
        """Hold what was planned and copied to the replay of the trace at ``path``."""
        trace = read_trace(path, cache=False)
        assert trace.step is not None
        steps = int(trace.step.max()) + 1
        options, device = self.options, self.device
        replayer = Replayer(
            trace, layout=self.layout, schedule="recorded", on_decline=options.on_decline,
            seed=options.policy_seed, ubatch=self.settings.prefill_chunk,
            trace_name=path.name if options.save_trace else f"picks of {self.loaded.name}",
            command=command,
        )  # fmt: skip
        cell = Cell(self.cell.policy, self.slots, params=self.cell.params, notes=tuple(self.notes))
        log = [seen for seen in pooled.log if seen.step < steps]
        check = check_run(replayer, cell, log, pooled.bytes_in(steps), self.started)
        # a recorded schedule replays its own steps, and does not know of how many lanes they are
        lanes = self.cell.concurrency
        check = replace(check, simulated=replace(check.simulated, concurrency=lanes))
        comparison = None
        if self.comparing is not None:
            comparison = self.comparing.result(self.texts, partial=bool(self.partial))
        if check.measured is not None:
            timing = step_times(replayer.access(1), self.ms[:steps])
            baseline = {}
            if recording is not None:
                whole = step_times(replayer.access(1), recording.ms[:steps])
                baseline["model without a pool"] = whole["ms_per_token"]
            timing |= {
                "device": device.name,
                "device_kind": device.kind,
                "device_note": device.note,
                "compute": f"the model's experts, {options.path} path",
                "baselines_ms_per_token": baseline,
                "equal_to_simulation": check.equal,
                "path": options.path,
                "experts_of_the_whole_model": PATHS[options.path],
                "comparison": comparison and comparison.to_dict(),
                "pool_bytes": pooled.pool_bytes,
                "staging_bytes": pooled.staging_bytes,
                "host_bytes": sum(p.nbytes for layer in self.layers for p in layer.parameters),
                "partial": self.partial,
            }
            measured = replace(
                check.measured,
                concurrency=lanes,
                ms_per_token=timing["ms_per_token"],
                timing=timing,
                notes=(*check.measured.notes, *([device.note] if device.note else [])),
                provenance=provenance(device, command, self.started)
                | {"warm_up": "counters: every step; times: as timing says"},
            )
            check = replace(check, measured=measured)
        return ModelRun(check, comparison, options.path, self.partial, self.interrupted)


@contextmanager
def _timed(
    model: Any, device: Device, ms: list[float], begin: Callable[[int], None] = lambda tokens: None
) -> Iterator[None]:
    """The milliseconds of every forward pass; ``begin`` is told how many tokens go in."""
    started = [0.0]

    def before(_m: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids: Any = kwargs.get("input_ids", args[0] if args else None)
        begin(ids.numel())
        started[0] = time.perf_counter()

    def after(_m: Any, _args: Any, _kwargs: Any, _out: Any) -> None:
        device.synchronize()  # an engine waits here for the token
        ms.append(1e3 * (time.perf_counter() - started[0]))

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
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
