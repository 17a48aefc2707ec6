"""A model's shape from its Hugging Face config.json, and the types its experts are to have.

A config names the same figures in many ways; the tables below hold the ways of the architectures in
transformers 5.24 (and of older remote code). The rules which layers have experts are those of its
modeling files. The bytes of an expert follow from its matrices and from the type: the config's own,
or the GGML types that a quantised copy would have. A figure that a config does not state is not
guessed: the error names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simlab.errors import SimlabError, UsageError
from simlab.model.ggml_types import OTHER_TYPES, TYPES, GgmlType, type_named
from simlab.model.shape import ExpertTensor, ModelShape

_LARGEST_CONFIG = 16 << 20
_MOST_LAYERS, _MOST_EXPERTS, _WIDEST = 4096, 65536, 1 << 24

#: Parts of a config that hold the text model, outermost first.
_TEXT_PARTS = ("thinker_config", "text_config", "llm_config", "language_config")
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
_N_EXPERT = (
    "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts",
    "num_routed_experts", "ffn_config.moe_num_experts",
)  # fmt: skip
_K = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    "top_k_experts", "num_selected_experts", "num_experts_per_topk", "ffn_config.moe_top_k",
)  # fmt: skip
_INTER = (
    "moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size",
    "ffn_config.ffn_hidden_size", "intermediate_size", "ffn_hidden_size", "d_ff",
)  # fmt: skip
#: Width that the experts see; a latent width where there is one.
_HIDDEN = (
    "moe_latent_size", "moe_hidden_size", "hidden_size", "d_model", "n_embd",
)  # fmt: skip
#: Words of a list of layer kinds that mean: this layer has experts.
_MOE_WORDS = {"sparse", "moe", "hash_moe"}
#: Models whose experts have no gate: up and down only.
_NO_GATE = {"nemotron_h", "nemotron_h_moe", "switch_transformers", "nllb-moe"}
_NAMES = ("gate", "up", "down")

_FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8"}


def read_config(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The config in a file, or in the ``config.json`` of a folder.

    Raises:
        UsageError: there is none. SimlabError: it is no JSON object.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        if not path.is_file():
            raise UsageError(
                f"there is no file {path}; name a folder with a config.json, or a GGUF"
            )
        if path.stat().st_size > _LARGEST_CONFIG:
            raise SimlabError(f"{path} is no config.json: it is larger than 16 MiB")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise SimlabError(f"{path} is not valid JSON; download it again") from None
    if not isinstance(config, dict):
        raise SimlabError(f"{path} is no config.json: it holds no JSON object")
    return config


def shape_of_config(
    config: Mapping[str, Any], source: str, *, dtype: str | None = None, name: str = ""
) -> ModelShape:
    """The shape of the model that a config describes.

    Args:
        source: the file it comes from, for messages. dtype: see ``expert_types``.

    Raises:
        UsageError: it is not a MoE model, a figure is missing, or the types cannot hold the rows.
    """
    text = _text_part(config)
    n_layers = _first(text, _LAYERS, _MOST_LAYERS)
    if n_layers is None and isinstance(text.get("layers_block_type"), list):
        n_layers = len(text["layers_block_type"])
    return shape_from(
        name=name or str(config.get("_name_or_path") or config.get("model_type") or source),
        source=source,
        n_layers=n_layers,
        layers=None if n_layers is None else moe_layers(text, n_layers),
        n_expert=_first(text, _N_EXPERT, _MOST_EXPERTS),
        k=_first(text, _K, _MOST_EXPERTS),
        hidden=_first(text, _HIDDEN, _WIDEST),
        inter=_first(text, _INTER, _WIDEST),
        gated=text.get("model_type") not in _NO_GATE,
        dtype=dtype if dtype is not None else _own_dtype(config, text),
    )


def shape_from(
    *,
    name: str,
    source: str,
    n_layers: int | None,
    layers: Sequence[int] | None,
    n_expert: int | None,
    k: int | None,
    hidden: int | None,
    inter: int | None,
    gated: bool,
    dtype: str | None,
) -> ModelShape:
    """A shape from its figures.

    Args:
        n_layers: all layers. layers: those with experts. hidden, inter: width that an expert sees,
            and its inner width.

    Raises:
        UsageError: a figure is None (the message names all such), or the types do not fit.
    """
    figures = {
        "number of layers": n_layers,
        "layers that have experts": layers,
        "number of experts": n_expert,
        "experts per token": k,
        "hidden size": hidden,
        "intermediate size of an expert": inter,
        "type of the expert weights (give --dtype, such as Q4_K)": dtype,
    }
    missing = [what for what, figure in figures.items() if figure is None]
    if (
        missing
        or n_layers is None
        or layers is None
        or n_expert is None
        or k is None
        or hidden is None
        or inter is None
        or dtype is None
    ):
        raise UsageError(f"{source} does not say: {', '.join(missing)}")
    if not layers:
        raise UsageError(f"{source}: no layer of this model has experts")
    if not k <= n_expert:
        raise UsageError(f"{source}: a token cannot use {k} of {n_expert} experts")
    names = _NAMES if gated else _NAMES[1:]
    tensors = []
    for part, kind in zip(names, expert_types(dtype, len(names)), strict=True):
        values, rows = (inter, hidden) if part == "down" else (hidden, inter)
        if values % kind.block:
            raise UsageError(
                f"{source}: rows of {values} values do not divide into {kind.name}'s blocks of"
                f" {kind.block} ({part}); llama.cpp would take another type there: name it with"
                f" --dtype, one type for each of {','.join(names)}"
            )
        tensors.append(ExpertTensor(part, kind.name, (values, rows), kind.row_bytes(values) * rows))
    experts = dict.fromkeys(layers, tuple(tensors))
    return ModelShape(
        name=name, source=source, n_expert=n_expert, k=k, n_layers=n_layers, experts=experts
    )


def expert_types(dtype: str, parts: int) -> list[GgmlType]:
    """The types of an expert's matrices: ``Q4_0`` for all, or ``Q4_K,Q4_K,Q6_K`` for each.

    Raises:
        UsageError: an unknown type, or not as many as there are matrices.
    """
    names = [name.strip() for name in dtype.split(",")]
    kinds = [type_named(name) for name in names]
    for name, kind in zip(names, kinds, strict=True):
        if kind is None:
            known = ", ".join([kind.name for kind in TYPES.values()] + [*OTHER_TYPES])
            raise UsageError(f"--dtype: there is no type {name!r}; there are {known}")
    found = [kind for kind in kinds if kind is not None]
    if len(found) not in (1, parts):
        raise UsageError(f"--dtype takes one type, or one for each of the {parts} matrices")
    return found * parts if len(found) == 1 else found


def moe_layers(text: Mapping[str, Any], n_layers: int) -> list[int] | None:
    """Layers that have experts; None when a rule of this config is not understood.

    Args:
        text: the text model's part of a config.
    """
    for key in ("mlp_layer_types", "layers_block_type"):
        kinds = text.get(key)
        if not isinstance(kinds, list) or not _is_list(kinds, n_layers, str):
            continue
        if _MOE_WORDS & set(kinds):
            return [i for i, kind in enumerate(kinds) if kind in _MOE_WORDS]
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "E" in pattern:
        return [i for i, kind in enumerate(pattern) if kind == "E"]
    named = text.get("moe_layers", text.get("moe_layers_enum"))
    if isinstance(named, str):  # "4,5,6"
        named = [int(part) for part in named.split(",") if part.strip().isdigit()]
    if isinstance(named, list) and all(_is_whole(i, 0, n_layers - 1) for i in named):
        return sorted(set(named))
    frequency = text.get("moe_layer_freq")
    if isinstance(frequency, list) and _is_list(frequency, n_layers, int):
        return [i for i, has in enumerate(frequency) if has]
    only_dense = text.get("mlp_only_layers") or []
    if not isinstance(only_dense, list):
        return None
    rules: list[Callable[[int], bool]] = [lambda i: i not in only_dense]

    def rule(
        keys: tuple[str, ...], least: int, make: Callable[[int], Callable[[int], bool]]
    ) -> None:
        number = _first(text, keys, _MOST_LAYERS, least=least)
        if number is not None:
            rules.append(make(number))

    rule(("first_k_dense_replace", "num_dense_layers"), 0, lambda n: lambda i: i >= n)
    rule(("moe_layer_freq",), 1, lambda n: lambda i: i % n == 0)
    rule(("decoder_sparse_step",), 1, lambda n: lambda i: (i + 1) % n == 0)
    rule(("interleave_moe_layer_step",), 1, lambda n: lambda i: (i + 1) % n == 0)
    offset = _first(text, ("expert_layer_offset",), _MOST_LAYERS, least=0) or 0
    rule(("expert_layer_period",), 1, lambda n: lambda i: i % n == offset)
    end = _first(text, ("moe_layer_end_index",), _MOST_LAYERS, least=0)
    last = n_layers - 1 if end is None else end
    rule(("moe_layer_start_index",), 0, lambda n: lambda i: n <= i <= last)
    rule(("moe_layer_interval",), 1, lambda n: lambda i: (i + 1) % n == 0)
    return [i for i in range(n_layers) if all(has(i) for has in rules)]


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config
    for key in _TEXT_PARTS:
        part = text.get(key)
        if isinstance(part, dict) and _first(text, _N_EXPERT, _MOST_EXPERTS) is None:
            text = part
    return text


def _own_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """The type of the checkpoint's own expert weights; None when simlab does not know its bytes."""
    quantization = config.get("quantization_config") or text.get("quantization_config")
    if isinstance(quantization, dict):
        return {"mxfp4": "MXFP4", "fp8": "F8"}.get(str(quantization.get("quant_method")))
    for part in (text, config):
        name = part.get("dtype") or part.get("torch_dtype")
        if name:
            return _FLOATS.get(str(name).removeprefix("torch."))
    return None


def _first(
    part: Mapping[str, Any], keys: Sequence[str], most: int, *, least: int = 1
) -> int | None:
    """The first of the keys that holds a number, or a list of equal numbers."""
    for key in keys:
        value: Any = part
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if _is_whole(value, least, most):
            return int(value)
    return None


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_list(value: object, length: int, kind: type) -> bool:
    return (
        isinstance(value, list)
        and len(value) == length
        and all(isinstance(each, kind) for each in value)
    )
