"""Picks of code that runs a model itself.

    with simlab.capture.tracing(model) as t:
        model.generate(**inputs, max_new_tokens=64)
    t.save("picks.parquet")

What becomes a request: each sequence of a ``generate()`` call, its prompt as prefill and what
follows as decode; and each sequence of a forward pass outside ``generate()`` that starts without a
cache, as prefill, together with the passes that go on with that cache, as decode. Columns that the
attention mask given to the model leaves out are not traced (padding on either side), nor is what
``generate()`` feeds to a sequence after its end. Beam search, assisted decoding and packed batches
are refused: there a computed token need not be the next one of its text. Everything is kept in
memory; ``simlab capture`` writes as it goes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simlab.capture.hooks import Picks, Tap, attach
from simlab.capture.sites import architecture
from simlab.errors import SimlabError
from simlab.trace.schema import DECODE, PREFILL, Trace, TraceMeta
from simlab.trace.write import write_trace

if TYPE_CHECKING:
    import torch

_UNKNOWN = -1


@dataclass
class _Batch:
    """Sequences that run together: [B] requests, columns counted from the first one on."""

    first_request: int
    size: int
    mask: npt.NDArray[np.bool_] | None  # [B, columns]: False is padding; None: all are real
    prompt: int  # columns before the first generated one
    ends: frozenset[int]
    column: int = 0
    real: npt.NDArray[np.int64] | None = None  # [B] tokens so far, without padding
    ended: npt.NDArray[np.bool_] | None = None  # [B]


class _Rows:
    """What one forward pass adds: the rows of `Picks` that count, and where they belong."""

    def __init__(
        self,
        picks: Picks,
        rows: npt.NDArray[np.int64],
        request: npt.NDArray[np.int64],
        token: npt.NDArray[np.int64],
        phase: npt.NDArray[np.uint8],
    ) -> None:
        self._picks: Picks | None = picks
        self._rows = rows
        self.request, self.token, self.phase = request, token, phase
        self.experts: npt.NDArray[np.int16]
        self.weights: npt.NDArray[np.float16] | None

    def settle(self) -> None:
        """Take the arrays; the model's tensors are let go."""
        if self._picks is not None:
            self.experts = self._picks.experts()[self._rows]
            weights = self._picks.router_weights()
            self.weights = None if weights is None else weights[self._rows]
            self._picks = None


class Tracing:
    """What `tracing` gives: the trace of what ran in its block."""

    def __init__(self, model: torch.nn.Module, tap: Tap) -> None:
        self.tap = tap
        self._model = model
        self._name = architecture(model)
        self._passes: list[_Rows] = []
        self._requests = 0
        self._batch: _Batch | None = None
        self._generating = False
        self._device = ""

    @property
    def trace(self) -> Trace:
        """The picks so far; every pass is a recorded step.

        Raises:
            SimlabError: nothing ran.
        """
        if not self._passes:
            raise SimlabError(f"{self._name}: nothing ran while it was traced, there are no picks")
        layers = np.asarray(self.tap.moe_layers, np.int16)
        columns: dict[str, list[npt.NDArray[Any]]] = {}
        for step, rows in enumerate(self._passes):
            rows.settle()
            n = len(rows.token)
            for name, value in (
                ("request", np.repeat(rows.request, len(layers))),
                ("token", np.repeat(rows.token, len(layers))),
                ("phase", np.repeat(rows.phase, len(layers))),
                ("layer", np.tile(layers, n)),
                ("step", np.full(n * len(layers), step)),
                ("experts", _wide(rows.experts, self.tap.k, -1)),
            ):
                columns.setdefault(name, []).append(value)
            if rows.weights is not None:
                columns.setdefault("weights", []).append(_wide(rows.weights, self.tap.k, 0))
        flat = {name: np.concatenate(parts) for name, parts in columns.items()}
        ran = np.greater_equal(flat["experts"], 0)
        order = np.lexsort((flat["layer"], flat["token"], flat["request"]))
        order = order[ran.any(1)[order]]  # a token that ran no expert in a layer has no row there
        flat = {name: value[order] for name, value in flat.items()}
        ran = ran[order]
        config = getattr(self._model, "config", None)
        import torch

        meta = TraceMeta(
            n_expert=self.tap.n_expert,
            k=self.tap.k,
            moe_layers=self.tap.moe_layers,
            model=getattr(config, "name_or_path", "") or self._name,
            expert_bytes=self.tap.expert_bytes(),
            kind="captured",
            source="simlab.capture.tracing",
            device=self._device,
            versions={"torch": torch.__version__},
        )
        return Trace(
            meta,
            request=flat["request"].astype(np.int32),
            token=flat["token"].astype(np.int32),
            phase=flat["phase"].astype(np.uint8),
            layer=flat["layer"].astype(np.int16),
            offsets=np.concatenate([[0], np.cumsum(ran.sum(1))]).astype(np.int64),
            experts=flat["experts"][ran].astype(np.uint16),
            weights=flat["weights"][ran].astype(np.float16) if "weights" in flat else None,
            step=flat["step"].astype(np.int32),
        )

    def save(self, path: str | os.PathLike[str]) -> TraceMeta:
        """Write the trace as Parquet; the metadata as stored."""
        return write_trace(self.trace, path)

    def _start(self, size: int, mask: Any, prompt: int, ends: frozenset[int]) -> None:
        known = None
        if mask is not None:
            if getattr(mask, "ndim", 0) != 2:
                raise SimlabError(f"{self._name}: the attention mask must be [batch, tokens]")
            known = mask.bool().numpy(force=True)
            if size % len(known):
                raise SimlabError(
                    f"{self._name}: a mask of {len(known)} sequences for a batch of {size}"
                )
            known = known.repeat(size // len(known), 0)  # several answers to a prompt
        self._batch = _Batch(
            self._requests, size, known, prompt, ends,
            real=np.zeros(size, np.int64), ended=np.zeros(size, np.bool_),
        )  # fmt: skip
        self._requests += size

    def _before(self, shape: tuple[int, int], kwargs: dict[str, Any]) -> None:
        """A forward pass over [B, columns] begins."""
        self.tap.discard()
        if kwargs.get("cu_seq_lens_q") is not None:
            raise SimlabError(f"{self._name}: packed batches cannot be traced; use generate()")
        if self._generating:
            return
        held = _held(kwargs)
        if not held:
            self._start(shape[0], kwargs.get("attention_mask"), shape[1], frozenset())
        elif self._batch is None or held not in (self._batch.column, _UNKNOWN):
            raise SimlabError(
                f"{self._name}: a pass goes on with a cache of"
                f" {held if held > 0 else 'some'} tokens that were not traced"
            )

    def _after(self, ids: Any, shape: tuple[int, int]) -> None:
        """A forward pass over [B, columns] is over."""
        picks = self.tap.take()
        size, width = shape
        if picks.n_tokens != size * width or any(len(t) != size * width for t in picks.ids):
            raise SimlabError(
                f"{self._name}: {size} x {width} tokens went in, {picks.n_tokens} reached the"
                " experts: padding or packing inside the model cannot be traced"
            )
        batch = self._batch
        assert batch is not None and batch.real is not None and batch.ended is not None
        if size != batch.size:
            raise SimlabError(f"{self._name}: a batch of {batch.size} went on as one of {size}")
        columns = np.arange(batch.column, batch.column + width)
        real = np.ones((size, width), np.bool_)
        if batch.mask is not None:
            inside = columns < batch.mask.shape[1]
            real[:, inside] = batch.mask[:, columns[inside]]
        decode = columns >= batch.prompt
        if batch.ends and ids is not None and decode.any():
            fed = np.isin(ids.numpy(force=True), list(batch.ends)) & decode
            batch.ended |= fed.any(1)
            real &= ~(np.logical_or.accumulate(fed, 1) | (batch.ended & ~fed.any(1))[:, None])
        token = batch.real[:, None] + real.cumsum(1) - 1
        batch.real += real.sum(1)
        batch.column += width
        rows = np.flatnonzero(real)
        if self._passes:
            self._passes[-1].settle()  # its copies are over by now
        self._device = str(picks.ids[0].device)
        phase = np.where(decode, DECODE, PREFILL).astype(np.uint8)
        request = batch.first_request + rows // width
        self._passes.append(
            _Rows(picks, rows, request, token.reshape(-1)[rows], phase[rows % width])
        )


def _wide(values: npt.NDArray[Any], k: int, fill: int) -> npt.NDArray[Any]:
    """[N, L, k'] as [N * L, k], padded."""
    padded = np.pad(values, ((0, 0), (0, 0), (0, k - values.shape[2])), constant_values=fill)
    return padded.reshape(-1, k)


def _held(kwargs: dict[str, Any]) -> int:
    """Tokens in the cache that a pass is given; _UNKNOWN if it does not say."""
    cache: Any = kwargs.get("past_key_values", kwargs.get("cache"))
    if not hasattr(cache, "get_seq_length"):
        return 0 if cache is None else _UNKNOWN
    try:
        return int(cache.get_seq_length())
    except ValueError:  # only recurrent layers, which do not count
        return _UNKNOWN


def _ends(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    if hasattr(value, "tolist"):
        value = value.tolist()
    return frozenset(value if isinstance(value, (list, tuple, set)) else [value])


@contextmanager
def tracing(
    model: torch.nn.Module, *, hook: str | None = None, weights: bool = False
) -> Iterator[Tracing]:
    """Trace everything that the model computes in the block; see the module's text.

    Args:
        hook, weights: as `simlab.capture.attach`.
    """
    with attach(model, hook=hook, weights=weights) as tap:
        traced = Tracing(model, tap)
        seen: list[tuple[Any, tuple[int, int]]] = []

        def before(_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.clear()
            ids = kwargs.get("input_ids", args[0] if args else None)
            given = kwargs.get("inputs_embeds") if ids is None else ids
            if given is None or given.dim() < 2:
                raise SimlabError(f"{traced._name}: called without [batch, tokens] to trace")
            shape = (int(given.shape[0]), int(given.shape[1]))
            traced._before(shape, kwargs)
            seen.append((ids, shape))

        def after(_model: Any, _args: Any, _kwargs: Any, _out: Any) -> None:
            traced._after(*seen.pop())

        handles = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, with_kwargs=True),
        ]
        generate, own = getattr(model, "generate", None), "generate" in vars(model)
        if generate is not None:
            model.generate = _watched(traced, model, generate)
        try:
            yield traced
        finally:
            for handle in handles:
                handle.remove()
            if generate is not None:
                del model.generate  # the class's own shows again
                if own:
                    model.generate = generate


def _watched(traced: Tracing, model: Any, generate: Any) -> Any:
    """generate() that tells the tracing about its batch."""
    name = traced._name

    def watched(*args: Any, **kwargs: Any) -> Any:
        configs = (kwargs.get("generation_config"), model.generation_config)

        def setting(key: str) -> Any:
            if key in kwargs:
                return kwargs[key]  # None, too, is an answer
            given = (getattr(config, key, None) for config in configs)
            return next((value for value in given if value is not None), None)

        if (setting("num_beams") or 1) > 1:
            raise SimlabError(f"{name}: beam search cannot be traced; set num_beams=1")
        if kwargs.get("assistant_model") is not None or setting("prompt_lookup_num_tokens"):
            raise SimlabError(f"{name}: assisted decoding cannot be traced; generate without it")
        if _held(kwargs):
            raise SimlabError(f"{name}: tracing starts at the prompt; give an empty cache")
        named = (kwargs.get(key) for key in ("input_ids", "inputs", "inputs_embeds"))
        ids = next((value for value in (*args[:1], *named) if value is not None), None)
        if ids is None or getattr(model.config, "is_encoder_decoder", False):
            raise SimlabError(f"{name}: generate() is traced with input_ids, of a decoder only")
        ends = _ends(setting("eos_token_id"))
        mask, pad = kwargs.get("attention_mask"), setting("pad_token_id")
        if mask is None and pad is not None and pad not in ends and not ids.is_floating_point():
            mask = ids != pad  # as generate() does
        size = len(ids) * (setting("num_return_sequences") or 1)
        traced._start(size, mask, int(ids.shape[1]), ends)
        traced._generating = True
        try:
            return generate(*args, **kwargs)
        finally:
            traced._generating = False
            traced._batch = None

    return watched
