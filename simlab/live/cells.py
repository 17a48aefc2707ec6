"""Cells on a device: each replayed first, then run with real copies, then compared and timed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from simlab.cost.link import LinkProfile
from simlab.cost.model import Costs, Work, calibrated, costs_of, predicted_row
from simlab.errors import SimlabError, UsageError
from simlab.live.bank import Bank
from simlab.live.device import Device, one_thread
from simlab.live.engine import Engine, Run, Server
from simlab.live.picks import picks_of
from simlab.live.planner import Planner
from simlab.live.provenance import provenance
from simlab.live.serve import CachedPath, Resident, StreamAll, StreamPicks
from simlab.live.timing import figures, timed_steps, work_of_steps
from simlab.replay.access import Access
from simlab.replay.cell import Cell, Outcomes
from simlab.replay.row import result_row
from simlab.replay.run import Replayer
from simlab.result.schema import Counters, Result
from simlab.trace.schema import PREFILL

#: A baseline needs no more steps than this, since each is like the other; and no more seconds.
BASELINE_STEPS, BASELINE_SECONDS = 20, 2.0


@dataclass(frozen=True)
class Options:
    """How cells are run.

    Attributes:
        bank_fraction: see Bank. compute: run the stand-in for the experts' compute.
        seconds: end a run at the first step after so many seconds.
        warm_up: decode steps left out of the times; None: a tenth of them, at most 64.
        repeat: runs of a cell. baselines: time the baselines too.
    """

    bank_fraction: float = 1.0
    compute: bool = False
    seconds: float | None = None
    warm_up: int | None = None
    repeat: int = 1
    baselines: bool = True

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise UsageError(f"--repeat must be 1 or more, not {self.repeat}")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise UsageError(f"--seconds must be above 0, not {self.seconds:g}")


@dataclass(frozen=True)
class LiveCell:
    """What became of one cell.

    Attributes:
        simulated, predicted, measured: its rows; they cover the same steps.
        differences: what the device did otherwise than the simulation; empty when all is equal.
        interrupted: Ctrl-C ended it; the rows are over the steps done.
    """

    simulated: Result
    predicted: Result
    measured: Result
    differences: tuple[str, ...]
    interrupted: bool

    @property
    def rows(self) -> list[Result]:
        """The three rows."""
        return [self.simulated, self.predicted, self.measured]


def live_cells(
    replayer: Replayer,
    cells: Sequence[Cell],
    device: Device,
    link: LinkProfile,
    options: Options,
    progress: Callable[[int], None] | None = None,
) -> Iterator[LiveCell]:
    """Run cells; Ctrl-C ends the last one early, and no other follows.

    Args:
        replayer: under the ``llama.cpp`` semantics.
        link: for predictions and for the efficiency of uploads.
        progress: called with the number of steps done since the last call.

    Raises:
        UsageError: the semantics or a policy cannot be run live, or expert bytes are unknown.
        SimlabError: device or pinned memory is short; the cells before were yielded.
    """
    if replayer.semantics != "llama.cpp":
        raise UsageError(f"live runs the llama.cpp semantics, not {replayer.semantics}")
    for cell in cells:
        if cell.policy.reads_future:
            raise UsageError(
                f"policy {cell.policy.name} knows the future; live runs what an engine could run"
            )
    bank = Bank(replayer.layout, device, fraction=options.bank_fraction)
    cells_at = Counter(cell.concurrency for cell in cells)
    lonely = {level: n == 1 for level, n in cells_at.items()}
    runner = _Runner(replayer, device, link, options, bank, lonely, progress)
    for cell in cells:
        with one_thread(device):
            found = runner.run(cell)
        yield found
        if found.interrupted:
            return


class _Runner:
    """What cells share: the bank, and the engine of the last size and concurrency."""

    def __init__(
        self,
        replayer: Replayer,
        device: Device,
        link: LinkProfile,
        options: Options,
        bank: Bank,
        lonely: dict[int, bool],
        progress: Callable[[int], None] | None,
    ) -> None:
        self.replayer, self.device, self.link = replayer, device, link
        self.options, self.bank, self.progress, self.lonely = options, bank, progress, lonely
        self.engine: Engine | None = None
        self.engine_of: tuple[object, ...] = ()
        self.baselines: dict[int, dict[str, float]] = {}
        self.costs: dict[int, Costs] = {}

    def run(self, cell: Cell) -> LiveCell:
        started = time.time()
        engine = self._engine(cell)
        if self.options.baselines and cell.concurrency not in self.baselines:
            self.baselines[cell.concurrency] = self._time_baselines(engine)
        runs: list[Run] = []
        for _ in range(self.options.repeat):
            runs.append(self._once(engine, cell))
            if runs[-1].done < len(engine.access.step_tokens):
                break  # the time is up, or Ctrl-C
        # a run that was cut short counts as far as it went only if there is no whole one
        interrupted = runs[-1].interrupted
        whole = [run for run in runs if run.done == max(r.done for r in runs)]
        if not whole[0].done:
            if interrupted:
                raise KeyboardInterrupt
            raise SimlabError("the schedule has no steps")
        return self._compared(engine, cell, whole, interrupted, started)

    def _engine(self, cell: Cell) -> Engine:
        wanted = (cell.concurrency, cell.slots)
        if self.engine is None or self.engine_of != wanted:
            self.engine = None  # its memory is the next one's
            access = self.replayer.access(cell.concurrency)
            offsets, picks = picks_of(self.replayer.trace, access)
            at = {
                layer: (g, i)
                for g, group in enumerate(self.replayer.layout.groups)
                for i, layer in enumerate(group.layers)
            }
            layers = [at[layer] for layer in self.replayer.trace.meta.moe_layers]
            self.engine = Engine(
                self.device, self.bank, access, offsets, picks, layers, cell.slots,
                compute=self.options.compute,
            )  # fmt: skip
            self.engine_of = wanted
        return self.engine

    def _once(self, engine: Engine, cell: Cell) -> Run:
        planner = Planner(
            cell.policy,
            self.replayer.layout,
            cell.slots,
            params=cell.params,
            seed=self.replayer.seed,
            gate_tokens=self.replayer.gate,
        )
        run = Run.of(engine.access)
        stream = self.replayer.on_decline == "stream"
        serve = [
            CachedPath(engine, g, planner, run, stream=stream) for g in range(len(planner.groups))
        ]
        ends = None if self.options.seconds is None else time.monotonic() + self.options.seconds

        def after_step(step: int) -> bool:
            if self.progress is not None:
                self.progress(1)
            return ends is not None and time.monotonic() >= ends

        engine.run(serve, run, begin_step=planner.begin_step, after_step=after_step)
        if not run.interrupted:
            engine.check_slots(planner)
        return run

    def _time_baselines(self, engine: Engine) -> dict[str, float]:
        """Milliseconds per token of the baselines, over the first decode steps."""
        access = engine.access
        decode = timed_steps(access, len(access.step_tokens), 0)[: BASELINE_STEPS + 1].tolist()
        found = {}
        for name, kind in _BASELINES.items():
            run = Run.of(access)
            serve = [kind(engine, g) for g in range(len(engine.lanes))]
            engine.run(serve, run, steps=decode, after_step=_stop_after(run, BASELINE_SECONDS))
            if run.interrupted:
                raise KeyboardInterrupt
            steps = decode[min(1, run.done - 1) : run.done]  # the first warms up
            found[name] = float(run.ms[steps].sum() / access.step_tokens[steps].sum())
        return found

    def _compared(
        self, engine: Engine, cell: Cell, runs: list[Run], interrupted: bool, started: float
    ) -> LiveCell:
        """The rows of a cell over the steps that were done."""
        replayer, n_steps, done = self.replayer, engine.access.schedule.n_steps, runs[0].done
        if done < n_steps:
            replayer = replayer.first_steps(done)
            why = "interrupted" if interrupted else "the time was up"
            note = f"PARTIAL, {why}: the first {done:,} of {n_steps:,} steps"
            cell = replace(cell, notes=(*cell.notes, note))
        outcomes = replayer.outcomes(cell)
        access = outcomes.access
        simulated = result_row(replayer, cell, outcomes, started)
        cell = replace(cell, notes=(*cell.notes, *self._notes(cell)))
        rows = [
            result_row(replayer, cell, _as_outcomes(run, access, outcomes), started) for run in runs
        ]
        differences = [
            difference
            for run, row in zip(runs, rows, strict=True)
            for difference in _differences(run, row, simulated, outcomes)
        ]
        steps = timed_steps(access, done, self.options.warm_up)
        timing = figures(runs, access, steps, self.link.peak_gb_s)
        work = work_of_steps(runs[0], access, steps)
        costs = self._costs(cell, work, timing["ms_per_token"])
        predicted = predicted_row(simulated, costs, work)
        timing |= {
            "device": self.device.name,
            "device_kind": self.device.kind,
            "device_note": self.device.note,
            "compute": "stand-in" if self.options.compute else "none",
            "baselines_ms_per_token": self.baselines.get(cell.concurrency, {}),
            "predicted_ms_per_token": predicted.ms_per_token,
            "error": (predicted.ms_per_token or 0.0) / timing["ms_per_token"] - 1,
            "calibrated_on_this": costs.source.endswith(_calibrated_on(cell)),
            "equal_to_simulation": not differences,
        }
        left_out = int((access.step_phase != PREFILL).sum()) - len(steps)
        how = provenance(self.device, replayer.command, started)
        how["versions"] = {**rows[0].provenance["versions"], **how["versions"]}
        how["warm_up"] = f"counters: every step; times: decode steps without the first {left_out}"
        measured = replace(
            rows[0],
            kind="measured",
            ms_per_token=timing["ms_per_token"],
            timing=timing,
            provenance={**rows[0].provenance, **how},
        )
        return LiveCell(simulated, predicted, measured, tuple(differences), interrupted)

    def _notes(self, cell: Cell) -> list[str]:
        """What a reader of measured figures must know."""
        notes = [self.device.note, self.bank.note()]
        if self.options.compute:
            notes.append("with a stand-in for the experts' compute")
        if self.replayer.on_decline == "cpu" and cell.policy.declines:
            notes.append("the CPU's work for declined misses is not done, so not in the times")
        return [note for note in notes if note]

    def _costs(self, cell: Cell, work: Work, ms: float) -> Costs:
        """The model of a concurrency level, calibrated at its first cell; where that is its only
        one, on the baseline without uploads, so that there is a prediction to be wrong.
        """
        level = cell.concurrency
        if level not in self.costs:
            costs, on, point = costs_of(self.link), _calibrated_on(cell), (work, ms)
            resident = self.baselines.get(level, {}).get("resident")
            if self.lonely[level] and resident is not None:
                on = "calibrated on the baseline resident"
                point = (replace(work, lookups=0, n_bytes=0, copies=0), resident)
            costs = calibrated(costs, [point])
            self.costs[level] = replace(costs, source=f"{costs.source}, {on}")
        return self.costs[level]


_BASELINES: dict[str, Callable[[Engine, int], Server]] = {
    "stream-picks": StreamPicks,
    "stream-all": StreamAll,
    "resident": Resident,
}


def _stop_after(run: Run, seconds: float) -> Callable[[int], bool]:
    """True once so many seconds have gone and three steps are done."""
    ends = time.monotonic() + seconds
    return lambda step: run.done > 2 and time.monotonic() > ends


def _calibrated_on(cell: Cell) -> str:
    return f"calibrated on {cell.policy.name} at {'+'.join(map(str, cell.slots))} slots"


def _as_outcomes(run: Run, access: Access, like: Outcomes) -> Outcomes:
    """A run in the form of the replayer's outcomes, cut to the steps of ``access``."""
    return Outcomes(
        access=access,
        outcome=run.outcome[: len(access.experts)],
        runs=run.runs[: len(access.set_step)],
        uncached=like.uncached,
        peak_bytes=None,
    )


def _differences(run: Run, live: Result, simulated: Result, outcomes: Outcomes) -> list[str]:
    """How a run differs from the replay: counters, every single lookup, bytes given to the link."""
    found = []
    for f in fields(Counters):
        ours, theirs = getattr(live.counters, f.name), getattr(simulated.counters, f.name)
        if ours != theirs:
            found.append(f"{f.name}: {ours:,} live, {theirs:,} simulated")
    n = len(outcomes.outcome)
    for name, mine, other in (
        ("outcome", run.outcome[:n], outcomes.outcome),
        ("expert", run.experts[:n], outcomes.access.experts),
        ("merged runs", run.runs[: len(outcomes.runs)], outcomes.runs),
    ):
        wrong = int((mine != other).sum())
        if wrong:
            found.append(f"{name}: {wrong:,} of {len(other):,} differ")
    moved = int(run.n_bytes[: run.done].sum())
    if moved != simulated.counters.bytes_moved:
        found.append(f"bytes: {moved:,} copied, {simulated.counters.bytes_moved:,} simulated")
    return found
