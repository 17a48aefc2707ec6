"""Fit the autoregressive router to a real trace, and show how far it lies from it.

    simlab import --from bmoe qwen.route.csv --out qwen.parquet
    python scripts/fit_synthetic.py qwen.parquet            # fit (minutes), then compare
    python scripts/fit_synthetic.py qwen.parquet --no-fit   # compare the preset as it is

Used is the trace's longest request. Fitted, on its decode rows, are the five statistics of FITTED;
everything else that is printed is a check, hit rates above all. docs/synthetic.md holds the tables.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from simlab.trace.read import read_trace
from simlab.trace.schema import DECODE
from simlab.trace.synth import DEFAULT_PRESET, PRESETS
from simlab.trace.synth_ar import ArParams, generate

Picks = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

LAGS = (1, 8, 32)
TOP = 21
FITTED = (
    "overlap at lag 1",
    "overlap at lag 8",
    "overlap at lag 32",
    f"coverage by {TOP} experts",
    "spread of lag 1 over layers",
)
CHECKED = (
    "spread of lag 8 over layers",
    "coverage by 8 experts",
    "coverage by 64 experts",
    "distinct experts of a layer",
    "correlation of lag 1 and coverage over layers",
)
#: Parameters that the fit moves; popularity and topic move together (one turn cannot part them).
FREE = ("popularity", "slow", "fast", "layer_spread")
#: Persistences tried; the pair with the least residual is kept.
SLOW_RHOS = (0.95, 0.98, 0.99)
FAST_RHOS = (0.3, 0.6, 0.8)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)


def read_turn(path: str) -> tuple[Picks, int]:
    """Decode picks bool [tokens, layers, experts] of the longest request; its prompt's tokens."""
    trace = read_trace(path, cache=False)
    longest = np.bincount(trace.request).argmax()
    rows = np.flatnonzero((trace.request == longest) & (trace.phase == DECODE))
    tokens, token = np.unique(trace.token[rows], return_inverse=True)
    layer = np.searchsorted(trace.meta.moe_layers, trace.layer[rows])
    picks = np.zeros((len(tokens), len(trace.meta.moe_layers), trace.meta.n_expert), np.bool_)
    for row, t, at in zip(rows, token, layer, strict=True):
        picks[t, at, trace.experts[trace.offsets[row] : trace.offsets[row + 1]]] = True
    return picks, int(tokens[0])


def draw_turn(params: ArParams) -> Picks:
    """Decode picks bool [tokens, layers, experts] of a one-request trace."""
    experts = np.concatenate([chunk.experts[chunk.phase == 1] for chunk in generate(params)])
    picks = np.zeros((*experts.shape[:2], params.experts), np.bool_)
    np.put_along_axis(picks, experts.astype(np.int64), True, axis=-1)
    return picks


def statistics(picks: Picks) -> Floats:
    """The numbers of FITTED and CHECKED, in that order, of one turn."""
    overlap = {
        lag: (picks[lag:] & picks[:-lag]).sum((0, 2)) / picks[lag:].sum((0, 2)) for lag in LAGS
    }
    counts = -np.sort(-picks.sum(0), axis=-1)
    covered = counts.cumsum(-1) / counts.sum(-1, keepdims=True)
    return np.array(
        [
            *(overlap[lag].mean() for lag in LAGS),
            covered[:, TOP - 1].mean(),
            overlap[1].std(),
            overlap[8].std(),
            covered[:, 7].mean(),
            covered[:, 63].mean(),
            (counts > 0).sum(-1).mean(),
            np.corrcoef(overlap[1], covered[:, TOP - 1])[0, 1],
        ]
    )


def like(params: ArParams, picks: Picks, prompt: int, seed: int) -> ArParams:
    """``params`` for one request of the real turn's shape."""
    return replace(
        params,
        layers=picks.shape[1],
        experts=picks.shape[2],
        k=int(picks[0, 0].sum()),
        requests=1,
        prompt_tokens=prompt,
        decode_tokens=picks.shape[0],
        length_spread=0.0,
        seed=seed,
    )


def simulate(params: ArParams, real: Picks, prompt: int, seeds: Sequence[int]) -> Floats:
    """Statistics [seeds, FITTED + CHECKED] of synthetic turns of the real one's shape."""
    return np.array([statistics(draw_turn(like(params, real, prompt, s))) for s in seeds])


def with_free(params: ArParams, x: Floats) -> ArParams:
    """``params`` with the free parameters at x."""
    values = dict(zip(FREE, np.round(x, 6).tolist(), strict=True))
    return replace(params, **values, topic=values["popularity"])


def fit(start: ArParams, real: Picks, prompt: int, seeds: Sequence[int]) -> tuple[ArParams, float]:
    """Levenberg-Marquardt on the mean over ``seeds``, the same for every step.

    Returns:
        The parameters, and the root mean square of the residuals.
    """
    n = len(FITTED)
    target = statistics(real)[:n]

    def residual(x: Floats) -> Floats:
        means: Floats = simulate(with_free(start, x), real, prompt, seeds).mean(0)[:n]
        return means - target

    x = np.array([getattr(start, name) for name in FREE])
    now, damping, step = residual(x), 1e-3, 0.04
    for _ in range(6):
        slope = np.array([residual(x + step * unit) - now for unit in np.eye(len(x))]).T / step
        for _ in range(4):
            left = slope.T @ slope
            move = np.linalg.solve(left + damping * np.diag(left.diagonal()), -slope.T @ now)
            tried = np.clip(x + np.clip(move, -0.3, 0.3), 0.01, (5.0, 5.0, 5.0, 1.0))
            then = residual(tried)
            if then @ then < now @ now:
                break
            damping *= 10
        else:
            break
        done = now @ now - then @ then < 1e-7
        x, now, damping = tried, then, damping / 5
        if done:
            break
    fitted, rms = with_free(start, x), float(np.sqrt((now**2).mean()))
    values = ", ".join(
        f"{name} {getattr(fitted, name):.3f}" for name in ("slow_rho", "fast_rho", *FREE)
    )
    print(f"{len(seeds)} seeds, rms {rms:.4f}: {values}", flush=True)
    return fitted, rms


def lru_hit_rate(picks: Picks, slots: int) -> float:
    """Hits per lookup of one LRU pool over all layers, cold at the start, ascending in a set."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = lookups = 0
    for token in picks:
        for layer, row in enumerate(token):
            keys = [(layer, int(expert)) for expert in np.flatnonzero(row)]
            missing = [key for key in keys if key not in cache]
            for key in keys:
                if key in cache:
                    cache.move_to_end(key)
            for key in missing:
                if len(cache) >= slots:
                    cache.popitem(last=False)
                cache[key] = None
            hits += len(keys) - len(missing)
            lookups += len(keys)
    return hits / lookups


def main() -> None:
    """Fit unless told not to, then print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="route trace of one turn (CSV)")
    parser.add_argument("--no-fit", action="store_true", help="only compare the preset")
    parser.add_argument("--seeds", type=int, default=64, help="synthetic turns per evaluation")
    options = parser.parse_args()
    real, prompt = read_turn(options.trace)
    params = PRESETS[DEFAULT_PRESET].params
    if not options.no_fit:
        start = replace(params, popularity=1.2, topic=1.2, slow=0.8, fast=1.1, layer_spread=0.4)
        found = []
        for slow_rho in SLOW_RHOS:
            for fast_rho in FAST_RHOS:
                at = replace(start, slow_rho=slow_rho, fast_rho=fast_rho)
                found.append(fit(at, real, prompt, range(100, 100 + max(1, options.seeds // 8))))
        best = min(found, key=lambda pair: pair[1])[0]
        fitted, _ = fit(best, real, prompt, range(100, 100 + options.seeds))
        values = {name: round(getattr(fitted, name), 2) for name in (*FREE, "topic")}
        params = replace(fitted, **values)
    print(f"\n{params}\n")

    # fresh seeds: not those that the fit has seen
    seeds = range(1000, 1000 + options.seeds)
    wanted, got = statistics(real), simulate(params, real, prompt, seeds)
    print("| statistic | real | synthetic | sd over traces | |\n|---|---|---|---|---|")
    for i, name in enumerate(FITTED + CHECKED):
        role = "fitted" if i < len(FITTED) else "check"
        mean, sd = got[:, i].mean(), got[:, i].std()
        print(f"| {name} | {wanted[i]:.3f} | {mean:.3f} | {sd:.3f} | {role} |")
    turns = [draw_turn(like(params, real, prompt, seed)) for seed in seeds[:8]]
    print("\n| slots, share of keys | LRU hits, real | LRU hits, synthetic | |\n|---|---|---|---|")
    for share in SHARES:
        slots = int(share * real[0].size)
        synthetic = np.mean([lru_hit_rate(picks, slots) for picks in turns])
        print(f"| {share:.0%} | {lru_hit_rate(real, slots):.3f} | {synthetic:.3f} | check |")


if __name__ == "__main__":
    main()
