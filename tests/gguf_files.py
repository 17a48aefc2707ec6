"""GGUF files of real models' shapes, written with the ``gguf`` package; the weights are holes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

#: name, shape as numpy has it (experts, rows, values), type
Tensor = tuple[str, tuple[int, ...], str]

#: Layers of Qwen3-30B-A3B Q4_K_M whose down matrix is Q6_K: 24 of 48.
Q6_LAYERS = frozenset({*range(6), *range(8, 42, 3), *range(42, 48)})


def n_bytes(shape: Sequence[int], kind: str) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(np.prod([int(n) for n in shape], dtype=object)) // block * size


def experts(
    layer: int, n_expert: int, hidden: int, inter: int, types: Sequence[str]
) -> list[Tensor]:
    """gate, up and down of one layer."""
    name = "blk.{}.ffn_{}_exps.weight"
    return [
        (name.format(layer, "gate"), (n_expert, inter, hidden), types[0]),
        (name.format(layer, "up"), (n_expert, inter, hidden), types[1]),
        (name.format(layer, "down"), (n_expert, hidden, inter), types[2]),
    ]


def qwen3_30b() -> list[Tensor]:
    """Qwen3-30B-A3B Q4_K_M: gate and up Q4_K, down Q4_K in 24 layers and Q6_K in 24."""
    tensors: list[Tensor] = [("token_embd.weight", (151936, 2048), "Q4_K")]
    for layer in range(48):
        tensors.append((f"blk.{layer}.attn_q.weight", (4096, 2048), "Q4_K"))
        tensors.append((f"blk.{layer}.ffn_gate_inp.weight", (128, 2048), "F32"))
        down = "Q6_K" if layer in Q6_LAYERS else "Q4_K"
        tensors += experts(layer, 128, 2048, 768, ("Q4_K", "Q4_K", down))
    return [*tensors, ("output.weight", (151936, 2048), "Q6_K")]


def flash_next() -> list[Tensor]:
    """Qwen3.8-Flash-Next in pure Q4_0."""
    return [t for layer in range(48) for t in experts(layer, 512, 2560, 640, ("Q4_0",) * 3)]


def write_gguf(
    path: Path,
    tensors: Sequence[Tensor],
    *,
    arch: str = "qwen3moe",
    k: int = 8,
    n_layers: int = 48,
    name: str = "Qwen3 30B A3B",
    per_file: int = 0,
    vocabulary: int = 0,
    numbers: dict[str, int] | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> list[Path]:
    """Write the header (or, with ``per_file`` tensors a file, the headers); returns the files."""
    writer = GGUFWriter(path, arch, split_max_tensors=per_file, endianess=endianess)
    writer.add_name(name)
    writer.add_block_count(n_layers)
    writer.add_expert_used_count(k)
    for key, value in (numbers or {}).items():
        writer.add_uint32(key, value)
    if vocabulary:
        writer.add_token_list([f"token {i}" for i in range(vocabulary)])
        writer.add_token_scores([0.0] * vocabulary)
    for tensor, shape, kind in tensors:
        size = n_bytes(shape, kind)
        writer.add_tensor_info(tensor, shape, np.dtype("f4"), size, GGMLQuantizationType[kind])
    names = writer.format_shard_names(path)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    for file, part in zip(names, writer.tensors, strict=True):
        data = sum(GGUFWriter.ggml_pad(t.nbytes, writer.data_alignment) for t in part.values())
        start = GGUFWriter.ggml_pad(os.path.getsize(file), writer.data_alignment)
        os.truncate(file, start + data)
    return list(names)
