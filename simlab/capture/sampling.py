"""Choosing the next token: greedy, or drawn with numbers that belong to the request alone.

Every request has a generator of its own, seeded by (seed, request): what is drawn for it does not
depend on which requests are computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simlab.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: 0 takes the likeliest token (greedy).
        top_k: only the k likeliest; 0 takes all.
        top_p: only the likeliest whose probabilities sum to p; 1 takes all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError("--temperature must be 0 or more")
        if self.top_k < 0:
            raise UsageError("--top-k must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError("--top-p must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def __str__(self) -> str:
        if self.greedy:
            return "greedy"
        kept = f", top-k {self.top_k}" if self.top_k else ""
        kept += f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"temperature {self.temperature:g}{kept}"


def generator(seed: int, request: int) -> np.random.Generator:
    """The random numbers of one request."""
    return np.random.default_rng([seed, request])


def choose(
    logits: torch.Tensor, sampling: Sampling, generators: Sequence[np.random.Generator]
) -> list[int]:
    """The next token of each row.

    Args:
        logits: [rows, vocabulary].
        generators: one a row; each gives one number, unless greedy.
    """
    import torch

    if sampling.greedy:
        return [int(i) for i in logits.argmax(-1).tolist()]
    if logits.dtype != torch.float64:
        logits = logits.float()
    count = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    values, ids = (logits / sampling.temperature).topk(count, -1)  # descending
    cumulated = values.softmax(-1).cumsum(-1)
    # the likeliest is always kept; the others while those before them sum to less than p
    kept = 1 + (cumulated[:, :-1] < sampling.top_p).sum(-1, keepdim=True)
    total = cumulated.gather(1, kept - 1)
    draws = [[g.random()] for g in generators]
    target = torch.tensor(draws, dtype=cumulated.dtype, device=cumulated.device) * total
    place = torch.minimum((cumulated <= target).sum(-1, keepdim=True), kept - 1)
    return [int(i) for i in ids.gather(1, place)[:, 0].tolist()]
