"""Synthetic router picks: logits as an autoregressive process with topics. No model is involved.

The logit of expert e in layer l at token t of a request is

    locality[l] * (popularity * A[l, e] + topic * B[topic, l, e]
                   + slow * S[l, e, t] + fast * F[l, e, t]) + W[l, e, t]

and the k experts with the highest logits are picked, highest first. A, B, S, F and W are standard
normal: A (popular everywhere) and B (popular within a topic) are drawn once for the whole trace,
S and F are first-order autoregressive (the next token keeps a share rho of the present value), W is
drawn anew for every token. All other scales are relative to W.

The same parameters and seed give the same picks whatever the chunk size, machine or numpy version:
random numbers come from the raw 64-bit stream of PCG64 (numpy promises that stream), each normal is
the sum of the word's four 16-bit quarters (Irwin-Hall of order 4, bounded at 3.46 standard
deviations), the arithmetic uses only exactly rounded operations, and logits are compared as
integers that carry the expert's id in their low bits, so that there are no ties. Request r has its
own stream: a trace of fewer requests is the beginning of a longer one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simlab.errors import UsageError
from simlab.trace.schema import DECODE, PREFILL

Floats = npt.NDArray[np.float64]

#: Working memory of one chunk, in logits.
CHUNK_LOGITS = 1 << 20

# A logit becomes an integer of this resolution, above 16 bits that hold the expert.
_RESOLUTION = float(1 << 24)
_ID_BITS = 16
_ID_MASK = (1 << _ID_BITS) - 1
# Four uniform 16-bit integers: mean and standard deviation of their sum.
_SUM_MEAN = 2.0 * (2**16 - 1)
_SUM_SD = math.sqrt((2.0**32 - 1.0) / 3.0)
# Words converted at a time: what fits a core's cache.
_BLOCK = 1 << 13


@dataclass(frozen=True)
class ArParams:
    """Shape and parameters of the process; the defaults are the preset qwen3-30b-a3b (synth.py).

    Attributes:
        layers: MoE layers, numbered from 0.
        experts: experts of a layer.
        k: picks per token and layer.
        requests: requests of the trace.
        prompt_tokens: mean prompt length.
        decode_tokens: mean number of decode tokens.
        length_spread: each request draws both lengths from mean * (1 - spread) to
            mean * (1 + spread), every length equally likely; 0..1, 0 = all equal. No length is
            0 unless its mean is.
        topics: number of topics, 1..26; each request begins with one drawn at random.
        topic_switch: probability, per token, that the request turns to another topic.
        popularity: scale of what makes an expert popular in all topics.
        topic: scale of what makes an expert popular in one topic.
        slow: scale of the slow component.
        slow_rho: share of the slow component that the next token keeps, 0 up to below 1.
        fast: scale of the fast component.
        fast_rho: share of the fast component that the next token keeps.
        layer_spread: how unequal layers are: locality[l] = max(0, 1 + layer_spread * normal).
        seed: seed of all streams.
    """

    layers: int = 48
    experts: int = 128
    k: int = 8
    requests: int = 16
    prompt_tokens: int = 64
    decode_tokens: int = 256
    length_spread: float = 0.5
    topics: int = 4
    topic_switch: float = 0.004
    popularity: float = 1.09
    topic: float = 1.09
    slow: float = 1.07
    slow_rho: float = 0.99
    fast: float = 1.13
    fast_rho: float = 0.6
    layer_spread: float = 0.39
    seed: int = 1

    def check(self) -> None:
        """Raise UsageError unless every parameter is in its range."""
        for f in fields(self):
            low, high = _RANGES[f.name]
            value = getattr(self, f.name)
            if not low <= value <= high:
                option = "--" + f.name.replace("_", "-")
                raise UsageError(f"{option} must be {low}..{high}, not {value}")
        if self.k > self.experts:
            raise UsageError(f"--k must be at most --experts ({self.experts}), not {self.k}")
        if self.prompt_tokens + self.decode_tokens < 1:
            raise UsageError("--prompt-tokens and --decode-tokens are both 0: nothing to generate")


_RANGES: dict[str, tuple[float, float]] = {
    "layers": (1, 4096),
    "experts": (1, 65536),
    "k": (1, 65536),
    "requests": (1, 2**31 - 1),
    "prompt_tokens": (0, 10**8),
    "decode_tokens": (0, 10**8),
    "length_spread": (0, 1),
    "topics": (1, 26),
    "topic_switch": (0, 1),
    "popularity": (0, 100),
    "topic": (0, 100),
    "slow": (0, 100),
    "slow_rho": (0, 0.999999),
    "fast": (0, 100),
    "fast_rho": (0, 0.999999),
    "layer_spread": (0, 1),
    "seed": (0, 2**63 - 1),
}


class Plan(NamedTuple):
    """What is known before a token is drawn. R requests, L layers, E experts.

    ``prompt``, ``decode``: int64 [R], tokens of each request; ``topic``: int64 [R], its first
    topic; ``base``: float64 [topics, L, E], constant part of the logits; ``locality``:
    float64 [L, 1].
    """

    prompt: npt.NDArray[np.int64]
    decode: npt.NDArray[np.int64]
    topic: npt.NDArray[np.int64]
    base: Floats
    locality: Floats

    def tags(self) -> dict[str, str]:
        """The first topic of each request, by request number."""
        return {str(r): f"topic-{chr(ord('a') + t)}" for r, t in enumerate(self.topic.tolist())}


class Chunk(NamedTuple):
    """Consecutive tokens of one request.

    ``request``: its number; ``first``: position of the first token; ``phase``: uint8 [n];
    ``experts``: uint16 [n, layers, k], highest logit first.
    """

    request: int
    first: int
    phase: npt.NDArray[np.uint8]
    experts: npt.NDArray[np.uint16]


def plan(params: ArParams) -> Plan:
    """Draw lengths, topics, popularity and locality.

    Raises:
        UsageError: a parameter is out of range.
    """
    params.check()
    shape = (params.topics, params.layers, params.experts)
    bits = _stream(params.seed, 0)
    lengths = _stream(params.seed, 1)
    popular = params.popularity * _normals(bits, shape[1:])
    locality = np.maximum(0.0, 1.0 + params.layer_spread * _normals(bits, (params.layers, 1)))
    base = locality * (popular + params.topic * _normals(bits, shape))
    drawn = _uniform(lengths, 3 * params.requests).reshape(params.requests, 3)
    prompt = _lengths(params.prompt_tokens, params.length_spread, drawn[:, 0])
    decode = _lengths(params.decode_tokens, params.length_spread, drawn[:, 1])
    topic = (drawn[:, 2] * params.topics).astype(np.int64)
    return Plan(prompt, decode, topic, base, locality)


def generate(params: ArParams, *, chunk_tokens: int | None = None) -> Iterator[Chunk]:
    """The picks, request by request, in chunks of bounded memory.

    Args:
        params: shape and parameters.
        chunk_tokens: most tokens of a chunk; by default what CHUNK_LOGITS allows. Changes nothing
            but where the picks are cut.

    Raises:
        UsageError: a parameter is out of range.
    """
    drawn = plan(params)
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_LOGITS // (params.layers * params.experts))
    for request in range(params.requests):
        yield from _request(params, drawn, request, chunk_tokens)


def _request(params: ArParams, drawn: Plan, request: int, chunk_tokens: int) -> Iterator[Chunk]:
    shape = (params.layers, params.experts)
    noise = _stream(params.seed, 2, request)
    turns = _stream(params.seed, 3, request)
    prompt = int(drawn.prompt[request])
    total = prompt + int(drawn.decode[request])
    topic = int(drawn.topic[request])
    keep = np.array([params.slow_rho, params.fast_rho]).reshape(2, 1, 1)
    renew = np.sqrt(1.0 - keep * keep)
    scale = np.array([params.slow, params.fast]).reshape(2, 1, 1) * drawn.locality
    state = _normals(noise, (2, *shape))
    for first in range(0, total, chunk_tokens):
        n = min(chunk_tokens, total - first)
        fresh = _normals(noise, (n, 3, *shape))
        turn = _uniform(turns, 2 * n).reshape(n, 2)
        logits = np.empty((n, *shape))
        for t in range(n):
            if params.topics > 1 and first + t > 0 and turn[t, 0] < params.topic_switch:
                topic = (topic + 1 + int(turn[t, 1] * (params.topics - 1))) % params.topics
            state = keep * state + renew * fresh[t, :2]
            part = scale * state
            logits[t] = drawn.base[topic] + part[0] + part[1] + fresh[t, 2]
        phase = np.where(np.arange(first, first + n) < prompt, PREFILL, DECODE).astype(np.uint8)
        yield Chunk(request, first, phase, _top(logits, params.k))


def _top(logits: Floats, k: int) -> npt.NDArray[np.uint16]:
    """Experts with the k highest logits of the last axis, highest first, lowest id among equals."""
    n_expert = logits.shape[-1]
    ranked = np.rint(logits * _RESOLUTION).astype(np.int64) << _ID_BITS
    ranked |= np.arange(_ID_MASK, _ID_MASK - n_expert, -1, dtype=np.int64)
    best = np.partition(ranked, n_expert - k, axis=-1)[..., n_expert - k :]
    best.sort(axis=-1)
    return (_ID_MASK - (best[..., ::-1] & _ID_MASK)).astype(np.uint16)


def _stream(seed: int, *purpose: int) -> np.random.PCG64:
    """An independent stream for one purpose: 0 popularity, 1 lengths, 2 noise, 3 topic switches."""
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=purpose))


def _normals(bits: np.random.PCG64, shape: tuple[int, ...]) -> Floats:
    """Numbers of mean 0 and variance 1, one 64-bit word each (see the module's text)."""
    result = np.empty(math.prod(shape))
    low = np.uint64(0x0000FFFF0000FFFF)
    for first in range(0, len(result), _BLOCK):
        block = result[first : first + _BLOCK]
        words: Any = bits.random_raw(len(block))
        pairs = (words & low) + ((words >> np.uint64(16)) & low)
        np.subtract(
            (pairs & np.uint64(0xFFFFFFFF)) + (pairs >> np.uint64(32)), _SUM_MEAN, out=block
        )
        block /= _SUM_SD
    return result.reshape(shape)


def _uniform(bits: np.random.PCG64, n: int) -> Floats:
    """n numbers in 0 <= x < 1, multiples of 2^-53."""
    words: Any = bits.random_raw(n)
    result: Floats = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _lengths(mean: int, spread: float, uniform: Floats) -> npt.NDArray[np.int64]:
    """Lengths within ``mean * spread`` of the mean, each equally likely; 0 only if the mean is."""
    reach = min(int(mean * spread), max(0, mean - 1))
    return mean - reach + (uniform * (2 * reach + 1)).astype(np.int64)
