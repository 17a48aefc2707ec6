"""What to type: the placement of experts that is predicted to decode fastest on a machine.

Device memory is spent on whole layers of experts, on a cache for the other layers, or on context.
Each way to spend it is replayed with a real trace and given milliseconds by the time model; nothing
here is measured, and every figure is marked as predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from simlab.cost.presets import COPY_US, Rate
from simlab.errors import SimlabError, UsageError
from simlab.model.budget import MIB, NothingCached, slots_for_budget
from simlab.model.shape import ModelShape, layout_for
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.result.schema import Result
from simlab.trace.schema import DECODE, Trace

GIB = 2**30
#: Placements of whole layers that are tried; the best one's neighbours are tried after them.
_TRIED = 7


@dataclass(frozen=True)
class Machine:
    """What there is to spend, and how fast it is.

    Attributes:
        vram, ram: bytes; ram None: not checked. reserve: bytes of vram left to buffers.
        link: of uploads. copy_us: each copy's latency. device: reading weights in decode.
        cpu: computing experts on the host.
        step_ms: a decode step with everything resident, if measured; else computed from ``device``.
    """

    vram: int
    ram: int | None
    reserve: int
    link: Rate
    device: Rate
    cpu: Rate
    copy_us: float = COPY_US
    step_ms: float | None = None


@dataclass(frozen=True)
class Choice:
    """One way to place the experts, with what is predicted of it.

    Attributes:
        resident: how many of the last MoE layers keep their experts on the device.
        mib: the --moe-cache-mib; 0: no cache, the CPU computes the other layers' experts.
        slots: of each group. hit_rate: of the cached path in decode; None without a cache.
        mib_per_token: uploaded. decode_ms: per token and stream lane, of one step.
        tok_s: over all streams. prefill_ms: transfers per prompt token; None without prompts.
        used: bytes of device memory. host: bytes of host memory. warnings: of the plan.
        pinned: experts of each other layer that never leave, in room taken from the cache: those
            that the trace picks most, which is hindsight. llama.cpp cannot pin.
    """

    resident: int
    mib: float
    slots: tuple[int, ...]
    hit_rate: float | None
    mib_per_token: float
    decode_ms: float
    tok_s: float
    prefill_ms: float | None
    used: int
    host: int
    break_even: float | None = None
    warnings: tuple[str, ...] = ()
    pinned: int = 0


class Adviser:
    """Predicts choices for one model, machine, trace and number of streams.

    Args:
        shape: with ``other_bytes`` known. kv_token: KV bytes of a token. context: tokens of context
            of each stream. streams: decoded together. policy: of the cache.

    Raises:
        UsageError: the trace does not fit the model, or the bytes of other weights are unknown.
    """

    def __init__(
        self,
        shape: ModelShape,
        machine: Machine,
        trace: Trace,
        *,
        kv_token: int,
        context: int,
        streams: int,
        policy: str = "lru",
        trace_name: str = "",
    ) -> None:
        if shape.other_bytes is None:
            raise UsageError(
                f"{shape.source} does not tell the bytes of the weights beside the experts: name"
                " the GGUF file, or give --other-bytes"
            )
        self.shape, self.machine, self.trace = shape, machine, trace
        self.kv_token, self.context, self.streams = kv_token, context, streams
        self.policy, self.trace_name = load_policy(policy), trace_name
        self.layers = sorted(shape.experts)
        self.other = shape.other_bytes - shape.input_bytes
        self._replayers: dict[tuple[int, int], Replayer] = {}
        if not (trace.phase == DECODE).any():
            raise UsageError(f"{trace_name or 'the trace'} has no decode tokens to predict from")
        access = self._replayer(0).access(streams)
        self.steps = len(access.step_tokens)
        self.tokens = int(access.step_tokens.sum())
        lookups = np.bincount(
            np.repeat(access.set_layer, np.diff(access.offsets)), minlength=len(self.layers)
        )
        # bytes of the distinct experts that a mean decode step touches, by layer
        one = [shape.layer_bytes(layer) / shape.n_expert for layer in self.layers]
        self._step_bytes = lookups * np.array(one) / self.steps

    # ---- memory ---------------------------------------------------------------------------------

    def kv(self, context: int | None = None) -> int:
        """Bytes of the KV cache of all streams, at another context than asked for if given."""
        return self.kv_token * (context or self.context) * self.streams

    def expert_bytes(self, layers: Sequence[int]) -> int:
        """Bytes of all experts of some layers."""
        return sum(self.shape.layer_bytes(layer) for layer in layers)

    def room(self, resident: int, context: int | None = None) -> int:
        """Bytes of device memory left for a cache; negative when it does not fit."""
        kept = self.expert_bytes(self.layers[len(self.layers) - resident :])
        return self.machine.vram - self.machine.reserve - self.other - self.kv(context) - kept

    def most_resident(self) -> int:
        """The most whole layers that fit.

        Raises:
            SimlabError: not even the other weights and the context fit.
        """
        if self.room(0) < 0:
            raise SimlabError(
                f"{self.other / GIB:.1f} GiB of weights beside the experts,"
                f" {self.kv() / GIB:.1f} GiB of KV cache and a reserve of"
                f" {self.machine.reserve / GIB:.1f} GiB do not fit"
                f" {self.machine.vram / GIB:.1f} GiB of device memory; take a smaller --ctx or"
                " --parallel"
            )
        return max(n for n in range(len(self.layers) + 1) if self.room(n) >= 0)

    # ---- time -----------------------------------------------------------------------------------

    @cached_property
    def base_ms(self) -> float:
        """A decode step with every expert resident."""
        if self.machine.step_ms is not None:
            return self.machine.step_ms
        return float(self.other + self._step_bytes.sum()) / self.machine.device.gb_s / 1e6

    def _cpu_ms(self, hosted: int) -> float:
        """What computing the first ``hosted`` layers' experts on the CPU adds to a step."""
        size = float(self._step_bytes[:hosted].sum())
        return size / self.machine.cpu.gb_s / 1e6 - size / self.machine.device.gb_s / 1e6

    def choose(
        self,
        resident: int,
        mib: float | None = None,
        *,
        context: int | None = None,
        pinned: int = 0,
    ) -> Choice:
        """Predict one placement.

        Args:
            resident: whole layers on the device, the last ones. mib: of the cache; None: all that
                is left, 0: no cache. context: other than asked for. pinned: see Choice.
        """
        hosted = self.layers[: len(self.layers) - resident]
        room = self.room(resident, context)
        size = max(0.0, float(room // MIB)) if mib is None else mib
        host = self.expert_bytes(hosted) + self.shape.input_bytes
        used = self.machine.vram - room
        without = self.base_ms + max(0.0, self._cpu_ms(len(hosted)))
        plain = Choice(
            resident, 0, (), None, 0.0, without, self._tok_s(without),
            self._prefill_ms(self.expert_bytes(hosted)), used, host,
        )  # fmt: skip
        if not hosted or size < 1:
            return plain
        layout = layout_for(self.shape, host_layers=hosted)
        try:
            slots, warnings = slots_for_budget(layout, size)
        except NothingCached:
            return plain
        row = self._replayer(resident, pinned).run(
            Cell(self.policy, tuple(slots), None, self.streams)
        )
        moved = row.counters.bytes_moved
        runs = row.counters.merged_runs
        assert moved is not None and runs is not None
        tensors = np.mean([len(self.shape.experts[layer]) for layer in hosted])
        copies = (runs + row.counters.streamed) * float(tensors)
        uploads = moved / self.machine.link.gb_s / 1e6 + copies * self.machine.copy_us / 1e3
        ms = self.base_ms + uploads / self.steps
        misses = row.counters.misses
        full = uploads / self.steps / (misses / row.counters.lookups) if misses else math.inf
        # the large path reads what is resident on the device
        kept = sum(
            n * sum(group.tensor_bytes) for n, group in zip(slots, layout.groups, strict=True)
        )
        return replace(
            plain,
            mib=size,
            slots=tuple(slots),
            hit_rate=row.hit_rate,
            mib_per_token=moved / MIB / self.tokens,
            decode_ms=ms,
            tok_s=self._tok_s(ms),
            prefill_ms=self._prefill_ms(self.expert_bytes(hosted) - kept),
            used=used + int(size * MIB),
            break_even=1.0 - (without - self.base_ms) / full,
            warnings=(*warnings, *self._cliff(row)),
            pinned=pinned,
        )

    def _tok_s(self, step_ms: float) -> float:
        return 1e3 * self.tokens / self.steps / step_ms

    def _prefill_ms(self, streamed: int) -> float:
        """Transfers per prompt token: a full ubatch of 512 touches nearly every expert."""
        return streamed / self.machine.link.gb_s / 1e6 / 512

    def _replayer(self, resident: int, pinned: int = 0) -> Replayer:
        if (resident, pinned) not in self._replayers:
            hosted = self.layers[: len(self.layers) - resident]
            layout = layout_for(self.shape, host_layers=hosted)
            self._replayers[resident, pinned] = Replayer(
                self.trace, layout=layout, prefill="skip", pin=pinned
            )
        return self._replayers[resident, pinned]

    def _cliff(self, row: Result) -> Iterator[str]:
        for n in row.slots:
            if n < row.cliff_slots:
                yield (
                    f"{n:,} slots are below the cliff at {row.cliff_slots:,.0f}: LRU evicts experts"
                    " before their layer comes again"
                )
                return

    # ---- search ---------------------------------------------------------------------------------

    def search(self, done: Callable[[], None] = lambda: None) -> list[Choice]:
        """Every placement that was tried, best predicted decode first."""
        most = self.most_resident()
        counts = sorted({round(most * i / (_TRIED - 1)) for i in range(_TRIED)})
        tried: dict[tuple[int, bool], Choice] = {}

        def attempt(count: int) -> None:
            for mib in (0.0, None):
                choice = self.choose(count, mib)
                tried.setdefault((count, choice.mib > 0), choice)
            done()

        for count in counts:
            attempt(count)
        best = min((c for c in tried.values()), key=lambda c: c.decode_ms)
        step = max(1, most // (_TRIED - 1))
        for near in {best.resident - step // 2, best.resident + step // 2} - set(counts):
            if 0 <= near <= most:
                attempt(near)
        # equal predictions: fewer whole layers, for a cache adapts to other text
        return sorted(tried.values(), key=lambda c: (c.decode_ms, c.resident))

    def with_pins(self, best: Choice) -> list[Choice]:
        """A cached placement with a quarter and a half of its slots pinned, where that can be."""
        hosted = len(self.layers) - best.resident
        each = min(sum(best.slots) // hosted, self.shape.n_expert - 1) if best.mib else 0
        counts = {each // 4, each // 2} - {0}
        return [self.choose(best.resident, best.mib, pinned=n) for n in sorted(counts)]

    def worth_of_a_gib(self, best: Choice) -> dict[str, float | None]:
        """Milliseconds a step that one more GiB saves, by what it is spent on; None: cannot be.

        ``context`` is what a GiB of context costs: the cache shrinks by as much.
        """
        worth: dict[str, float | None] = {"cache": None, "whole layers": None, "context": None}
        if best.mib:
            worth["cache"] = best.decode_ms - self.choose(best.resident, best.mib + 1024).decode_ms
            if best.mib > 1024:
                less = self.choose(best.resident, best.mib - 1024)
                worth["context"] = best.decode_ms - less.decode_ms
        left = len(self.layers) - best.resident
        if left:
            size = self.expert_bytes(self.layers[left - 1 : left]) / GIB
            count = min(left, max(1, round(1 / size)))
            more = self.choose(best.resident + count, best.mib)
            worth["whole layers"] = (best.decode_ms - more.decode_ms) / (count * size)
        return worth

    def contexts(self, best: Choice, longest: int) -> list[tuple[int, Choice | None]]:
        """The same placement at contexts of doubling length; None: it does not fit."""
        found: list[tuple[int, Choice | None]] = []
        context = 4096
        while context <= longest:
            fits = self.room(best.resident, context) >= 0
            choice = self.choose(best.resident, context=context) if fits else None
            found.append((context, choice))
            context *= 2
        return found
