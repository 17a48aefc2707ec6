"""Two runs of a model side by side: what the first computed is kept, and the second held to it.

Kept in host memory for each step: the tokens that went in, the output of every experts module, and
the logits. Where the second run gives anything else, the first place is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simlab.capture.sites import Site
from simlab.errors import SimlabError
from simlab.live.device import host_memory, mib

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Step:
    """What one forward pass was given and gave, on the host.

    Attributes:
        ids: [rows, columns]. outputs: [rows x columns, hidden] a MoE layer.
        logits: [rows, vocabulary] of the last column.
    """

    ids: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    logits: torch.Tensor


@contextmanager
def watched(
    model: torch.nn.Module, sites: Sequence[Site], take: Callable[[Step], None]
) -> Iterator[None]:
    """Hand every forward pass of the model to ``take``."""
    seen: list[Any] = [None] * len(sites)
    ids: list[Any] = [None]

    def start(_m: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids[0] = kwargs.get("input_ids", args[0] if args else None)

    def keep(place: int) -> Callable[..., None]:
        def hook(_m: Any, _args: Any, _kwargs: Any, out: torch.Tensor) -> None:
            seen[place] = out.detach().reshape(-1, out.shape[-1])

        return hook

    def finish(_m: Any, _args: Any, _kwargs: Any, out: Any) -> None:
        # copies, because what is on the host already may be changed in place later
        host = [t.to("cpu", copy=True) for t in seen]
        logits = out.logits.detach()[:, -1].to("cpu", copy=True)
        take(Step(ids[0].to("cpu", copy=True), tuple(host), logits))

    with ExitStack() as hooks:
        handles = [model.register_forward_pre_hook(start, with_kwargs=True)]
        handles.append(model.register_forward_hook(finish, with_kwargs=True))
        for place, site in enumerate(sites):
            handles.append(site.module.register_forward_hook(keep(place), with_kwargs=True))
        for handle in handles:
            hooks.callback(handle.remove)
        yield


@dataclass(frozen=True)
class Divergence:
    """The first place at which two runs differ.

    Attributes:
        step: number of the forward pass. request, token: where the row is.
        layer: whose experts gave another output, or None when only the logits differ.
        max_abs: the largest difference in that row; NaN where one run gave no number.
    """

    step: int
    request: int
    token: int
    layer: int | None
    max_abs: float

    def __str__(self) -> str:
        where = "the logits" if self.layer is None else f"the experts of layer {self.layer}"
        return (
            f"request {self.request}, token {self.token} (step {self.step}), in {where}: largest"
            f" difference {self.max_abs:.3g}"
        )


@dataclass(frozen=True)
class Comparison:
    """How a run compares with the one before.

    Attributes:
        steps: compared. identical: every output, all logits and every token are equal.
        first: the first divergence. max_abs_logits: the largest difference of logits in the steps
            that were given the same tokens.
        same_text: every request got the same tokens.
        texts_part: the first (request, index of the generated token) that differs.
    """

    steps: int
    identical: bool
    first: Divergence | None
    max_abs_logits: float
    same_text: bool
    texts_part: tuple[int, int] | None

    @property
    def why(self) -> str:
        """Where the runs part, in words; empty when they are identical."""
        if self.first is not None:
            return f"first divergence at {self.first}"
        if self.texts_part is not None:
            return "request {}: generated token {} is another one".format(*self.texts_part)
        return "" if self.identical else "the runs computed different steps"

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return asdict(self)


@dataclass(eq=False)
class Recording:
    """The steps of the first run, and what it generated.

    Attributes:
        steps: in order. rows: (request, token) of each row of a step.
        texts: request -> generated tokens. ms: milliseconds of each step.
    """

    steps: list[Step] = field(default_factory=list)
    rows: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)
    ms: list[float] = field(default_factory=list)


class Comparing:
    """Holds a second run to a recording, step by step."""

    def __init__(self, recording: Recording, layers: Sequence[int]) -> None:
        self._recording = recording
        self._layers = tuple(layers)
        self._steps = 0
        self._parted = False
        self._first: Divergence | None = None
        self._max_abs = 0.0

    def take(self, step: Step) -> None:
        """Compare the next step."""
        import torch

        number = self._steps
        self._steps += 1
        if self._parted or number >= len(self._recording.steps):
            self._parted = True
            return
        before = self._recording.steps[number]
        if not torch.equal(before.ids, step.ids):
            self._parted = True  # other tokens went in: nothing to compare any more
            return
        if self._first is None:
            for layer, was, now in zip(self._layers, before.outputs, step.outputs, strict=True):
                if self._differs(number, layer, was, now):
                    break
        if not torch.equal(before.logits, step.logits):
            self._max_abs = max(self._max_abs, _distance(before.logits, step.logits))
            if self._first is None:
                self._differs(number, None, before.logits, step.logits)

    def _differs(
        self, number: int, layer: int | None, was: torch.Tensor, now: torch.Tensor
    ) -> bool:
        import torch

        if torch.equal(was, now):
            return False
        row = int((was != now).any(1).nonzero()[0, 0])
        request, token = self._recording.rows[number]
        # logits are of the last column of each sequence only
        place = row if layer is not None else (row + 1) * (len(request) // len(was)) - 1
        self._first = Divergence(
            number, int(request[place]), int(token[place]), layer, _distance(was[row], now[row])
        )
        return True

    def result(self, texts: dict[int, list[int]], *, partial: bool = False) -> Comparison:
        """How the runs compare.

        Args:
            texts: request -> what the second run generated.
            partial: it ended early; what it has not generated is not held against it.
        """
        part = None
        for request, was in sorted(self._recording.texts.items()):
            now = texts.get(request, [])
            equal = 0
            while equal < min(len(was), len(now)) and was[equal] == now[equal]:
                equal += 1
            short = equal == len(now) and partial
            if equal < max(len(was), len(now)) and not short:
                part = (request, equal)
                break
        whole = partial or self._steps == len(self._recording.steps)
        identical = self._first is None and not self._parted and part is None and whole
        return Comparison(self._steps, identical, self._first, self._max_abs, part is None, part)


def _distance(was: torch.Tensor, now: torch.Tensor) -> float:
    return float((was.double() - now.double()).abs().max())


def check_room(tokens: int, layers: int, hidden: int, vocabulary: int, size: int) -> None:
    """Raise SimlabError where a recording would take more than half of the free host memory.

    Args:
        tokens: of the run. hidden, vocabulary: widths. size: bytes of one number.
    """
    needed = tokens * (layers * hidden + vocabulary) * size
    free = host_memory()
    if free is not None and needed > free // 2:
        raise SimlabError(
            f"comparing needs up to {mib(needed)} of host memory and {mib(free)} are free: use"
            " fewer prompts or --max-new-tokens, or --no-compare"
        )
