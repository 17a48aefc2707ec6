"""Random small traces, as rows for the naive twin and as a Trace for the product.

``small_trace(Random(seed))`` for numbered cases; ``small_traces()`` for hypothesis, which draws the
random numbers itself and so can shrink a failing case.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st
from naive import Row, Shape, schedule

from simlab.trace.schema import Trace, TraceMeta


@dataclass(frozen=True)
class SmallTrace:
    """The same picks twice; ``step_of_row`` is the trace's recorded forward pass."""

    rows: list[Row]
    shape: Shape
    step_of_row: list[int]
    trace: Trace

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(request, token) of the trace, in order."""
        return sorted({(r[0], r[1]) for r in self.rows})


def as_trace(rows: list[Row], meta: TraceMeta, step_of_row: list[int] | None = None) -> Trace:
    """The rows as a Trace."""
    return Trace(
        meta=meta,
        request=np.array([r[0] for r in rows], np.int32),
        token=np.array([r[1] for r in rows], np.int32),
        phase=np.array([r[2] for r in rows], np.uint8),
        layer=np.array([r[3] for r in rows], np.int16),
        offsets=np.cumsum([0, *(len(r[4]) for r in rows)], dtype=np.int64),
        experts=np.array([e for r in rows for e in r[4]], np.uint16),
        weights=np.array([w for row in rows for w in weights_of(row)], np.float16),
        step=None if step_of_row is None else np.array(step_of_row, np.int32),
    )


def weights_of(row: Row) -> list[float]:
    """Router weights of a row's picks: some 64ths, which sum up exactly in any order."""
    request, token, _, layer, experts = row
    return [
        (1 + (7 * request + 13 * token + 5 * layer + 29 * i) % 64) / 64 for i in range(len(experts))
    ]


def small_trace(
    rnd: Random, *, max_requests: int = 5, max_tokens: int = 6, decode_only: bool = False
) -> SmallTrace:
    """1-4 layers in 1-3 groups, 2-8 experts, k 1-3, sticky picks, absent rows, rows short of k."""
    n_layers, n_expert = rnd.randint(1, 4), rnd.randint(2, 8)
    k = rnd.randint(1, min(3, n_expert))
    layers = sorted(rnd.sample(range(7), n_layers))
    sizes = rnd.choices([(7, 7, 9), (10, 5), (3, 4, 4)], k=n_layers)
    stickiness, absent, short = rnd.random(), rnd.choice([0, 0, 0.15]), rnd.choice([0, 0, 0.3])
    popular = rnd.uniform(1, 3)

    rows: list[Row] = []
    for request in sorted(rnd.sample(range(9), rnd.randint(1, max_requests))):
        # now and then a prompt that is too long for the cached path
        longest = 40 if rnd.random() < 0.1 else max_tokens
        prompt = 0 if decode_only else rnd.randint(0, longest)
        turn = prompt + 2 if rnd.random() < 0.25 and not decode_only else -1
        last: dict[int, list[int]] = {}
        for token in range(prompt + rnd.randint(0 if prompt else 1, max_tokens)):
            # a second turn: one more prompt token among the answer's
            phase = int(token >= prompt and token != turn)
            for layer in layers:
                if rnd.random() < absent:
                    continue
                experts: list[int] = []
                wanted = rnd.randint(1, k) if rnd.random() < short else k
                while len(experts) < wanted:
                    expert = int(n_expert * rnd.random() ** popular)
                    if last.get(layer) and rnd.random() < stickiness:
                        expert = rnd.choice(last[layer])
                    elif len(experts) + 1 == n_expert:
                        expert = next(e for e in range(n_expert) if e not in experts)
                    if expert not in experts:
                        experts.append(expert)
                    else:  # repeats must not starve a row of its last picks
                        last[layer] = []
                last[layer] = experts
                rows.append((request, token, phase, layer, experts))
    if not rows:
        rows.append((0, 0, 1, layers[0], [0]))

    step = {
        token: i // 2  # pairs of steps fused, so that prompts and answers share some
        for i, s in enumerate(schedule(rows, rnd.randint(1, 3), ubatch=rnd.randint(1, 8)))
        for token in s.tokens
    }
    step_of_row = [step[r[0], r[1]] for r in rows]
    members: dict[tuple[int, ...], list[int]] = {}
    for layer, size in zip(layers, sizes, strict=True):
        members.setdefault(size, []).append(layer)
    shape = Shape(
        list(members.values()),
        n_expert,
        k,
        {layer: sum(size) for layer, size in zip(layers, sizes, strict=True)},
    )
    meta = TraceMeta(n_expert, k, tuple(layers), expert_bytes=tuple(sizes))
    return SmallTrace(rows, shape, step_of_row, as_trace(rows, meta, step_of_row))


def small_traces(**limits: Any) -> st.SearchStrategy[SmallTrace]:
    """The same for hypothesis."""
    return st.randoms(use_true_random=False).map(lambda rnd: small_trace(rnd, **limits))
