"""The toy router of seed article 000: one layer, 512 experts, ten picks a token, some stickiness.

The article replays three toy traces (stickiness 0, 0.4, 0.7) drawn one after the other from a
single random generator, so a trace depends on those drawn before it. Everything made here is
synthetic: no model produced these picks.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Sequence

import numpy as np

import simlab
from simlab.errors import UsageError
from simlab.trace.schema import DECODE, Trace, TraceMeta

#: The article's toy: experts of its one layer, picks a token, tokens a trace, generator seed.
EXPERTS = 512
K = 10
TOKENS = 4000
SEED = 7
#: The article's traces in the order in which they are drawn.
ORDER = (0.0, 0.4, 0.7)

#: Exponent that bends uniform numbers towards low ids: the popular experts have low ids.
_SKEW = 1.8


def route(
    n_expert: int, k: int, previous: Sequence[int], p_stick: float, rnd: random.Random
) -> list[int]:
    """Draw the ``k`` distinct experts of one token, ascending.

    Each draw repeats one of the previous token's experts with probability ``p_stick`` and
    otherwise takes an expert by popularity; an expert that is already picked is drawn again.
    The order of calls to ``rnd`` is part of the definition: without a previous token the first
    question (repeat or not) is never asked.

    Args:
        n_expert: experts of the layer.
        k: picks, at most ``n_expert``.
        previous: experts of the previous token, ascending; empty for the first.
        p_stick: probability that a draw repeats a previous expert, 0..1.
        rnd: the generator, advanced.
    """
    chosen: set[int] = set()
    while len(chosen) < k:
        repeat = bool(previous) and rnd.random() < p_stick
        if repeat:
            expert = rnd.choice(previous)
        else:
            expert = min(n_expert - 1, int(rnd.random() ** _SKEW * n_expert))
        chosen.add(expert)
    return sorted(chosen)


def toy_trace(
    stickiness: float,
    *,
    tokens: int = TOKENS,
    seed: int = SEED,
    after: Sequence[float] | None = None,
) -> Trace:
    """The toy trace of one stickiness.

    Args:
        stickiness: probability that a draw repeats a previous expert, 0..1 (at 1 all tokens
            are equal).
        tokens: tokens of this trace and of each one drawn before it.
        seed: seed of the generator that the traces share.
        after: stickiness of the traces drawn before this one; by default those that the article
            draws before it (none when its stickiness is not one of the article's).

    Raises:
        UsageError: a stickiness outside 0..1, or no tokens.
    """
    if after is None:
        after = ORDER[: ORDER.index(stickiness)] if stickiness in ORDER else ()
    for value in (*after, stickiness):
        if not 0 <= value <= 1:
            raise UsageError(f"stickiness must be 0..1, not {value}")
    if tokens < 1:
        raise UsageError(f"a toy trace needs at least 1 token, not {tokens}")
    rnd = random.Random(seed)
    rows: list[list[int]] = []
    for value in (*after, stickiness):
        rows = []
        previous: list[int] = []
        for _ in range(tokens):
            previous = route(EXPERTS, K, previous, value, rnd)
            rows.append(previous)
    before = ",".join(str(value) for value in after) or "none"
    meta = TraceMeta(
        n_expert=EXPERTS,
        k=K,
        moe_layers=(0,),
        model=f"toy router (synthetic), stickiness {stickiness}",
        kind="synthetic",
        source="the toy router of seed article 000",
        command=f"simlab synth toy --stickiness {stickiness} --after {before}"
        f" --tokens {tokens} --seed {seed}",
        seed=seed,
        tags={"0": f"stickiness {stickiness}"},
        notes=("synthetic: drawn from a toy router, no picks of a real model",),
        versions={"simlab": simlab.__version__, "python": platform.python_version()},
    )
    return Trace(
        meta=meta,
        request=np.zeros(tokens, np.int32),
        token=np.arange(tokens, dtype=np.int32),
        phase=np.full(tokens, DECODE, np.uint8),
        layer=np.zeros(tokens, np.int16),
        offsets=np.arange(0, tokens * K + 1, K, dtype=np.int64),
        experts=np.array(rows, np.uint16).reshape(-1),
    )
