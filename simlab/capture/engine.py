"""Running a model over requests, one forward pass (step) at a time, with the picks of each.

A loop of its own around the model's forward pass, because a trace needs to know of every row which
request and position it belongs to. Lanes hold the requests that are decoded together: prompts are
computed in steps of at most ``prefill_chunk`` tokens, then every busy lane gives one token a step.

``batch``: so many prompts start together, padded on the left, and the next ones when all have
ended. ``concurrency``: each prompt is computed alone, and a lane whose request ended takes the next
one at the next step (continuous batching; the schedule of `simlab.replay.schedule`). In both a
request that has ended is taken out of the batch, so nothing is computed after its end, and padding
reaches the model only in a padded prefill, whose padding rows are dropped here.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simlab.capture.cache import check_joinable, join, keep, new_cache, recurrent
from simlab.capture.hooks import Picks, Tap
from simlab.capture.sampling import Sampling, choose, generator
from simlab.errors import SimlabError, UsageError
from simlab.trace.schema import DECODE, PREFILL

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Settings:
    """What a run does with each prompt.

    Attributes:
        max_new_tokens: tokens generated at most; the last one is never computed, so it has no row.
        batch: prompts that start together. concurrency: lanes that refill. One of them is 1.
        prefill_chunk: most tokens of a prompt in one step.
        teacher_forced: compute the texts themselves, and generate nothing.
        forced_phase: phase of the rows then.
        sampling: how a token is chosen. seed: of what is drawn.
        ignore_eos: generate on after an end-of-text token.
    """

    max_new_tokens: int = 128
    batch: int = 1
    concurrency: int = 1
    prefill_chunk: int = 512
    teacher_forced: bool = False
    forced_phase: int = DECODE
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch", "concurrency", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be 1 or more")
        if self.batch > 1 and self.concurrency > 1:
            raise UsageError("--batch and --concurrency exclude each other: choose one")
        if self.teacher_forced and self.concurrency > 1:
            raise UsageError("--teacher-forced decodes nothing: use --batch, not --concurrency")
        if self.seed < 0:
            raise UsageError("--seed must be 0 or more")

    @property
    def lanes(self) -> int:
        """Most requests in one step."""
        return max(self.batch, self.concurrency)


@dataclass(eq=False)
class Request:
    """A request on its way.

    Attributes:
        index: its number in the trace. prompt: token ids.
        new: tokens generated so far. fed: tokens computed so far.
    """

    index: int
    prompt: Sequence[int]
    generator: np.random.Generator
    new: list[int] = field(default_factory=list)
    fed: int = 0


@dataclass(frozen=True, eq=False)
class StepRows:
    """The picks of one step, N tokens.

    Attributes:
        step: number of the forward pass.
        request, token, phase: integers [N].
        experts: int16 [N, layers, k], -1 pads. weights: float16 of that shape, or None.
    """

    step: int
    request: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]
    phase: npt.NDArray[np.uint8]
    experts: npt.NDArray[np.int16]
    weights: npt.NDArray[np.float16] | None


class Engine:
    """Runs requests to their ends.

    Args:
        model: a decoder-only transformers model, in eval mode. tap: hooks on it.
        eos: ids that end a request.
        emit: takes the rows of each step.
        done: takes each request that has ended.
        stop: asked before each step; True ends the run early.
        first_step: number of the first step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tap: Tap,
        settings: Settings,
        *,
        eos: Iterable[int] = (),
        emit: Callable[[StepRows], None],
        done: Callable[[Request], None] = lambda request: None,
        stop: Callable[[], bool] = lambda: False,
        first_step: int = 0,
    ) -> None:
        self.model = model
        self.tap = tap
        self.settings = settings
        self.eos = frozenset() if settings.ignore_eos else frozenset(eos)
        self._emit, self._done, self._stop = emit, done, stop
        self._step = first_step
        self._lanes: list[Request] = []
        self._cache: Any = None
        self._width = 0  # columns of the cache: the longest lane
        self._call = _Forward(model)
        if settings.lanes > 1:
            if not self._call.positions:
                raise UsageError(
                    f"{type(model).__name__} takes no positions, so padding would shift them: leave"
                    " out --batch and --concurrency"
                )
            check_joinable(new_cache(model), type(model).__name__)

    def run(self, requests: Iterable[tuple[int, Sequence[int]]]) -> bool:
        """Run (index, prompt ids) in order; returns whether all came to their ends.

        Raises:
            SimlabError: a MoE layer was not seen in a step, or saw other tokens than were given.
        """
        import torch

        waiting = deque(requests)
        with torch.inference_mode():
            while waiting or self._lanes:
                free = self.settings.lanes - len(self._lanes)
                if self.settings.batch > 1 and self._lanes:
                    free = 0
                while waiting and free:
                    taken = min(free, self.settings.batch, len(waiting))
                    if not self._prefill([waiting.popleft() for _ in range(taken)]):
                        return False
                    free = self.settings.lanes - len(self._lanes)
                    if self.settings.batch > 1:
                        break
                if self._lanes:
                    if self._stop():
                        return False
                    self._decode()
        return True

    def _prefill(self, starting: Sequence[tuple[int, Sequence[int]]]) -> bool:
        """Compute prompts and give those that go on a lane; False when told to stop."""
        requests = [
            Request(index, prompt, generator(self.settings.seed, index))
            for index, prompt in starting
        ]
        cache = new_cache(self.model)
        if len(requests) > 1 and recurrent(cache):
            return all(self._prefill([pair]) for pair in starting)
        width = max(len(r.prompt) for r in requests)
        ids = np.zeros((len(requests), width), np.int64)
        real = np.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = request.prompt
            real[row, width - len(request.prompt) :] = 1
        token = real.cumsum(1) - 1
        forced = self.settings.teacher_forced
        logits = None
        for start in range(0, width, self.settings.prefill_chunk):
            if self._stop():
                return False
            span = slice(start, min(start + self.settings.prefill_chunk, width))
            logits = self._call(
                ids[:, span], real[:, : span.stop], token[:, span].clip(0), cache, not forced
            )
            phase = self.settings.forced_phase if forced else PREFILL
            self._rows(self.tap.take(), requests, token[:, span], real[:, span].astype(bool), phase)
        for request in requests:
            request.fed = len(request.prompt)
        if forced:
            for request in requests:
                self._done(request)
            return True
        going = self._choose(requests, logits)
        if going:
            longest = max(requests[i].fed for i in going)
            if len(going) < len(requests) or longest < width:
                keep(cache, going, longest)
            self._take_lanes([requests[i] for i in going], cache, longest)
        return True

    def _take_lanes(self, requests: list[Request], cache: Any, longest: int) -> None:
        if not self._lanes:
            self._cache, self._width = cache, longest
        else:
            self._width = max(self._width, longest)
            join(self._cache, cache, self._width)
        self._lanes += requests

    def _decode(self) -> None:
        """One token of every lane."""
        lanes = self._lanes
        ids = np.array([[r.new[-1]] for r in lanes])
        token = np.array([[r.fed] for r in lanes])
        columns = np.arange(self._width + 1)
        real = (columns >= self._width - token).astype(np.int64)
        logits = self._call(ids, real, token, self._cache, True)
        picks = self.tap.take()  # a GPU goes on computing while they are copied
        self._width += 1
        for request in lanes:
            request.fed += 1
        going = self._choose(lanes, logits)
        self._rows(picks, lanes, token, np.ones_like(token, dtype=bool), DECODE)
        if len(going) == len(lanes):
            return
        self._lanes = [lanes[i] for i in going]
        if not going:
            self._cache = None
            return
        self._width = max(r.fed for r in self._lanes)
        keep(self._cache, going, self._width)

    def _choose(self, requests: Sequence[Request], logits: Any) -> list[int]:
        """Give each request its next token; returns the places of those that go on."""
        chosen = choose(logits, self.settings.sampling, [r.generator for r in requests])
        going = []
        for place, (request, token) in enumerate(zip(requests, chosen, strict=True)):
            request.new.append(token)
            if token in self.eos or len(request.new) >= self.settings.max_new_tokens:
                self._done(request)
            else:
                going.append(place)
        return going

    def _rows(
        self,
        picks: Picks,
        requests: Sequence[Request],
        token: npt.NDArray[Any],
        real: npt.NDArray[np.bool_],
        phase: int,
    ) -> None:
        """Hand out the picks of a step without its padding."""
        if picks.n_tokens != real.size:
            raise SimlabError(
                f"{type(self.model).__name__}: its experts saw {picks.n_tokens} tokens in a step of"
                f" {real.size}: simlab cannot tell which they are"
            )
        index = np.array([r.index for r in requests], np.int32)
        flat = real.reshape(-1)
        weights = picks.router_weights()
        self._emit(
            StepRows(
                step=self._step,
                request=np.broadcast_to(index[:, None], real.shape)[real],
                token=token[real].astype(np.int32),
                phase=np.full(int(flat.sum()), phase, np.uint8),
                experts=picks.experts()[flat],
                weights=None if weights is None else weights[flat],
            )
        )
        self._step += 1


class _Forward:
    """The model's forward pass with the arguments that it knows."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        known = inspect.signature(model.forward).parameters
        self.positions = "position_ids" in known
        self._cache = "cache" if "cache" in known else "past_key_values"
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        embeddings = model.get_input_embeddings()
        self._device = embeddings.weight.device

    def __call__(
        self,
        ids: npt.NDArray[np.int64],
        real: npt.NDArray[np.int64],
        token: npt.NDArray[Any],
        cache: Any,
        logits: bool,
    ) -> torch.Tensor | None:
        """Logits [rows, vocabulary] of the last column, or None.

        Args:
            ids, token: [rows, columns of this step]. real: [rows, columns so far], 0 is padding.
        """
        import torch

        def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self._device)

        positions = {"position_ids": tensor(token)} if self.positions else {}
        out = self.model(
            input_ids=tensor(ids),
            attention_mask=tensor(real),
            use_cache=True,
            **{self._cache: cache},
            **positions,
            **self._last,
        )
        return out.logits[:, -1] if logits else None
