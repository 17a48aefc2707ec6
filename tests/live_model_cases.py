"""What the tests of live mode with a model share: a small model, and a run of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import architectures
import pytest
import torch
from capture_cases import Words, loaded
from capture_cases import prompts as token_ids

from simlab.capture.engine import Settings
from simlab.capture.prompts import Prompt
from simlab.live import pooled
from simlab.live.device import open_device
from simlab.live.model_loop import ModelCell, ModelRun, Options, run_model
from simlab.policy.registry import load_policy
from simlab.replay.sizes import parse_sizes

SETTINGS = Settings(max_new_tokens=4, prefill_chunk=16)
TEXTS = [
    Prompt(f"text {i}", " ".join(map(str, ids)))
    for i, ids in enumerate(token_ids([9, 4, 20], seed=3))
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name: str, dtype: Any = None) -> Any:
    (case,) = [case for case in architectures.CASES if case.module == name]
    return architectures.build(case).to(dtype or torch.float32)


def ready(model: Any) -> Any:
    """With a tokenizer of numbers that stays inside the vocabulary."""

    class Small(Words):
        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [3 + int(word) % 90 for word in text.split()]}

    return replace(loaded(model), tokenizer=Small(), context=128)


def cell(policy: str = "lru", slots: str = "50%", concurrency: int = 1) -> ModelCell:
    return ModelCell(load_policy(policy), parse_sizes(slots)[0], concurrency)


def run(
    model: Any, *cells: ModelCell, settings: Settings = SETTINGS, device: Any = None, **o: Any
) -> list[ModelRun]:
    with open_device("cpu") as cpu:
        return list(
            run_model(ready(model), TEXTS, device or cpu, settings, cells or [cell()], Options(**o))
        )


def state(model: Any) -> list[Any]:
    """All that a run may not leave behind changed."""
    return [
        [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()],
        [sorted(vars(m)) for m in model.modules()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        model.config._experts_implementation,
    ]


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    """Do something in the middle of a step: in its second layer."""
    real = pooled.PooledExperts.serve

    def serve(self: Any, layer: int, picks: Any) -> Any:
        if self.steps == step + 1 and layer == 1:
            act()
        return real(self, layer, picks)

    monkeypatch.setattr(pooled.PooledExperts, "serve", serve)
