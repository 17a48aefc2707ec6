"""A trace for the tests of tuning, comparing and explaining: sticky picks, many short requests."""

from __future__ import annotations

import numpy as np

from simlab.trace.schema import Trace, TraceMeta


def sticky_trace(
    requests: int = 24,
    tokens: int = 40,
    *,
    layers: int = 3,
    experts: int = 16,
    stickiness: float = 0.7,
    seed: int = 0,
) -> Trace:
    """k = 2 decode picks; an expert stays for the next token with that chance; tags a and b."""
    rng = np.random.default_rng(seed)
    popular = 1 / np.arange(1, experts + 1)
    popular /= popular.sum()
    picks = np.empty((requests, tokens, layers, 2), np.uint16)
    for request in range(requests):
        for layer in range(layers):
            order = rng.permutation(experts)
            now = rng.choice(order, 2, replace=False, p=popular)
            for token in range(tokens):
                kept = now[rng.random(2) < stickiness]
                others = np.setdiff1d(order, kept)
                chance = popular[np.argsort(order)][others]
                new = rng.choice(others, 2 - len(kept), replace=False, p=chance / chance.sum())
                now = np.concatenate([kept, new])
                picks[request, token, layer] = now
    shape = (requests, tokens, layers)
    number, token, layer = (a.ravel() for a in np.indices(shape))
    rows = len(number)
    return Trace(
        TraceMeta(
            n_expert=experts,
            k=2,
            moe_layers=tuple(range(layers)),
            expert_bytes=((100, 100, 50),) * layers,
            tags={str(i): "ab"[i % 2] for i in range(requests)},
            content_hash="sticky",
        ),
        request=number.astype(np.int32),
        token=token.astype(np.int32),
        phase=np.ones(rows, np.uint8),
        layer=layer.astype(np.int16),
        offsets=np.arange(0, 2 * rows + 1, 2, dtype=np.int64),
        experts=picks.reshape(-1),
    )
