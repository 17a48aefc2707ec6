"""Bytes of KV cache a token takes, from a GGUF header.

Per attention layer: keys and values of every KV head, or, where attention is compressed (DeepSeek's
MLA), one latent vector and its rotary part; two bytes a number (llama.cpp's default f16). Layers
without KV heads (state-space layers of hybrids) take none that grows with the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BYTES = 2


def kv_bytes_per_token(metadata: Mapping[str, Any]) -> int | None:
    """Bytes of a token of one stream over all layers; None when the header does not tell."""
    arch = metadata.get("general.architecture")

    def number(name: str) -> Any:
        return metadata.get(f"{arch}.{name}")

    layers = number("block_count")
    if not isinstance(layers, int) or not 0 < layers < 2**16:
        return None
    drafts = number("nextn_predict_layers")
    if isinstance(drafts, int) and 0 < drafts < layers:
        layers -= drafts
    latent = number("attention.kv_lora_rank")
    if isinstance(latent, int):
        rotary = number("rope.dimension_count")
        if not isinstance(rotary, int):
            return None
        # llama.cpp keeps the latent and the rotary part as the keys, and no values
        return layers * (latent + rotary) * _BYTES
    heads = number("attention.head_count_kv") or number("attention.head_count")
    total = number("attention.head_count")
    if isinstance(total, list):
        total = max((n for n in total if isinstance(n, int)), default=None)
    key, value = number("attention.key_length"), number("attention.value_length")
    width = number("embedding_length")
    if not isinstance(key, int) and isinstance(width, int) and isinstance(total, int) and total:
        key = width // total
    if not isinstance(value, int):
        value = key
    if not isinstance(key, int) or not isinstance(value, int):
        return None
    if isinstance(heads, int):
        heads = [heads] * layers
    if not isinstance(heads, list) or len(heads) < layers:
        return None
    if not all(isinstance(n, int) and n >= 0 for n in heads):
        return None
    return sum(heads[:layers]) * (key + value) * _BYTES


def longest_context(metadata: Mapping[str, Any]) -> int | None:
    """Tokens of context that the model was made for; None when the header does not tell."""
    found = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return found if isinstance(found, int) and found > 0 else None
