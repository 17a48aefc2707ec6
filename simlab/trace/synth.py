"""Synthetic traces of the autoregressive router: presets, provenance, rows, files.

Whatever is written here says ``kind = "synthetic"`` and, in its notes, what it was fitted to.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

import simlab
from simlab.errors import UsageError
from simlab.trace.importers.options import parse_expert_bytes
from simlab.trace.schema import Trace, TraceMeta
from simlab.trace.synth_ar import ArParams, generate, plan
from simlab.trace.write import TraceWriter


@dataclass(frozen=True)
class Preset:
    """Parameters under a name.

    Attributes:
        params: the parameters.
        geometry: the model whose number of layers, experts and picks it has.
        expert_bytes: per layer the bytes of one expert per tensor (gate, up, down).
        fitted: what its parameters were fitted to.
    """

    params: ArParams
    geometry: str
    expert_bytes: tuple[tuple[int, ...], ...]
    fitted: str


DEFAULT_PRESET = "qwen3-30b-a3b"

# Bytes of one expert's 768 x 2048 matrix: Q4_K has 144 and Q6_K 210 bytes per 256 weights.
_Q4_K = 768 * 2048 // 256 * 144
_Q6_K = 768 * 2048 // 256 * 210
# Layers whose down projection is Q6_K in the Q4_K_M file.
_Q6_K_LAYERS = {*range(6), *range(8, 42, 3), *range(42, 48)}

#: Parameter sets by name; docs/synthetic.md tells how they were fitted.
PRESETS: dict[str, Preset] = {
    DEFAULT_PRESET: Preset(
        params=ArParams(),
        geometry="Qwen3-30B-A3B, Q4_K_M",
        expert_bytes=tuple(
            (_Q4_K, _Q4_K, _Q6_K if layer in _Q6_K_LAYERS else _Q4_K) for layer in range(48)
        ),
        fitted=(
            "fitted, with 6 picks in place of 8, to one real chat turn of Qwen3-30B-A3B run with 6"
            " experts per token (128 decode tokens): overlap with the token 1, 8 and 32 before,"
            " coverage by 21 of 128 experts, spread of the lag-1 overlap over layers; hit rates"
            " were not fitted"
        ),
    )
}

# Parameters that do not touch what a preset was fitted to.
_FREE = {"layers", "k", "requests", "prompt_tokens", "decode_tokens", "length_spread", "seed"}


def find_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def ar_meta(params: ArParams, preset: str, expert_bytes: str | None = None) -> TraceMeta:
    """Provenance of the trace that ``params`` give.

    Args:
        params: shape and parameters, checked here.
        preset: the preset they started from; what differs from it is named.
        expert_bytes: as for parse_expert_bytes; by default the preset's if the trace has its layers
            and experts, else unknown.

    Raises:
        UsageError: a parameter is out of range, there is no such preset, or ``expert_bytes`` does
            not cover the layers.
    """
    base = find_preset(preset)
    tags = plan(params).tags()
    changed = [
        f.name for f in fields(params) if getattr(params, f.name) != getattr(base.params, f.name)
    ]
    options = "".join(f" --{n.replace('_', '-')} {getattr(params, n)}" for n in changed)
    same_shape = not {"layers", "experts"} & set(changed)
    layers = tuple(range(params.layers))
    if expert_bytes is None:
        sizes = base.expert_bytes if same_shape else ()
    else:
        sizes = parse_expert_bytes(expert_bytes, layers)
        options += f" --expert-bytes {expert_bytes}"
    shape = f"{params.layers} x {params.experts}, k = {params.k}"
    refitted = sorted(set(changed) - _FREE)
    return TraceMeta(
        n_expert=params.experts,
        k=params.k,
        moe_layers=layers,
        model=f"synthetic, {f'shape of {base.geometry}' if same_shape else shape}",
        expert_bytes=sizes,
        kind="synthetic",
        source=f"autoregressive router process, preset {preset}",
        command=f"simlab synth ar --preset {preset}{options}",
        seed=params.seed,
        tags=tags,
        notes=(
            "synthetic: drawn from a random process, no picks of a real model",
            f"not fitted: {', '.join(refitted)} differ from the preset"
            if refitted
            else base.fitted,
            "parameters: "
            + ", ".join(f"{f.name} {getattr(params, f.name)}" for f in fields(params)),
        ),
        versions={
            "simlab": simlab.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    )


def ar_columns(
    params: ArParams, *, chunk_tokens: int | None = None
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """The picks as rows of a trace, chunk by chunk (see synth_ar.generate).

    Yields:
        ``request token phase layer``, integers [R], and ``experts`` uint16 [R, k], in the order
        (request, token, layer).
    """
    layers = np.arange(params.layers, dtype=np.int16)
    for chunk in generate(params, chunk_tokens=chunk_tokens):
        n = len(chunk.phase)
        yield {
            "request": np.full(n * params.layers, chunk.request, np.int32),
            "token": np.repeat(
                np.arange(chunk.first, chunk.first + n, dtype=np.int32), params.layers
            ),
            "phase": np.repeat(chunk.phase, params.layers),
            "layer": np.tile(layers, n),
            "experts": chunk.experts.reshape(-1, params.k),
        }


def ar_trace(
    params: ArParams, preset: str = DEFAULT_PRESET, *, chunk_tokens: int | None = None
) -> Trace:
    """The whole trace in memory; arguments as in ar_meta and synth_ar.generate."""
    meta = ar_meta(params, preset)
    pieces = list(ar_columns(params, chunk_tokens=chunk_tokens))
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    picks = columns.pop("experts")
    offsets = np.arange(0, picks.size + 1, params.k, dtype=np.int64)
    return Trace(meta=meta, offsets=offsets, experts=picks.reshape(-1), **columns)


def write_ar(
    path: str | os.PathLike[str],
    params: ArParams,
    preset: str = DEFAULT_PRESET,
    expert_bytes: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> TraceMeta:
    """Write the trace to ``path``, chunk by chunk: memory does not grow with its length.

    Args:
        path: the Parquet file to be.
        params, preset, expert_bytes: as in ar_meta.
        progress: called with the number of tokens written since the last call.

    Returns:
        The metadata as stored, with the content hash.

    Raises:
        UsageError: a parameter is out of range.
        TraceError: the file cannot be written.
    """
    writer = TraceWriter(path, ar_meta(params, preset, expert_bytes))
    try:
        with writer:
            for columns in ar_columns(params):
                writer.append(**columns)
                if progress is not None:
                    progress(len(columns["request"]) // params.layers)
            return writer.close()
    except BaseException:
        # nothing is worth recovering: the same command makes the same picks again
        writer.stream_path.unlink(missing_ok=True)
        raise
