"""A model's shape from a GGUF file, or from all the files that it is split into."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from simlab.errors import SimlabError, UsageError
from simlab.model.gguf_header import GgufHeader, TensorInfo, read_header
from simlab.model.shape import ExpertTensor, ModelShape

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z")
_EXPERTS = re.compile(r"blk\.(\d{1,5})\.ffn_(gate_up|gate|up|down)_exps\.weight\Z")
_OLD_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight\Z")
#: llama.cpp's order of a layer's expert tensors (src/llama-moe-cache.cpp).
_ORDER = ("gate_up", "gate", "up", "down")
#: As many files as a split model may have: enough for 2 TB in files of 2 GB.
_MOST_SHARDS = 1024
_MOST_LAYERS, _MOST_EXPERTS, _LONGEST_NAME = 4096, 65536, 120


def read_gguf(path: str | os.PathLike[str]) -> ModelShape:
    """Read the headers of a model; of a split one, any of its files will do.

    Raises:
        UsageError: a file is not there, or it is not a MoE model. SimlabError: a header is damaged,
            or the files do not belong together.
    """
    path = Path(path)
    shards = _shards(path)
    metadata = dict(shards[0].metadata)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in tensors:
                raise SimlabError(f"{shard.path} holds tensor {tensor.name} a second time")
            tensors[tensor.name] = tensor
    total = metadata.get("split.tensors.count")
    if len(shards) > 1 and isinstance(total, int) and total not in (0, len(tensors)):
        raise SimlabError(
            f"the {len(shards)} files of {path} hold {len(tensors):,} tensors, not the {total:,}"
            " that the first one names; download them again"
        )
    return _shape(path, metadata, tensors)


def _shards(path: Path) -> list[GgufHeader]:
    first = read_header(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or not 0 <= count <= _MOST_SHARDS:
        raise SimlabError(f"{path} says it is split into {count} files")
    if count <= 1:
        return [first]
    name = _SHARD.match(path.name)
    if not name or int(name["count"]) != count:
        raise SimlabError(
            f"{path} is one of {count} files, but its name does not end in"
            f" -00001-of-{count:05d}.gguf; give the files back their names"
        )
    shards = []
    for number in range(count):
        each = path.with_name(f"{name['stem']}-{number + 1:05d}-of-{count:05d}.gguf")
        if not each.exists():
            raise UsageError(f"{each} is missing: {path.name} is one of {count} files")
        shard = first if each == path else read_header(each)
        told = shard.metadata.get("split.no"), shard.metadata.get("split.count")
        if told != (number, count):
            raise SimlabError(
                f"{each} says it is file {_place(told[0])} of {told[1]}, not {number + 1} of"
                f" {count}; give the files back their names"
            )
        shards.append(shard)
    return shards


def _place(number: object) -> object:
    return number + 1 if isinstance(number, int) else number


def _shape(
    path: Path, metadata: Mapping[str, object], tensors: dict[str, TensorInfo]
) -> ModelShape:
    layers: dict[int, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        found = _EXPERTS.match(name)
        if found:
            layers.setdefault(int(found[1]), {})[found[2]] = tensor
    if not layers:
        if any(_OLD_EXPERTS.match(name) for name in tensors):
            raise UsageError(
                f"{path} keeps each expert as a tensor of its own, as files of early 2024 do; take"
                " a newer conversion"
            )
        raise UsageError(f"{path} has no expert tensors (ffn_*_exps): it is not a MoE model")
    arch = str(metadata.get("general.architecture", "unknown"))
    notes = []
    n_layers = _number(metadata.get(f"{arch}.block_count")) or max(layers) + 1
    if not max(layers) < n_layers <= _MOST_LAYERS:
        raise SimlabError(
            f"{path} says it has {n_layers:,} layers, and has experts in layer {max(layers):,}"
        )
    drafts = _number(metadata.get(f"{arch}.nextn_predict_layers")) or 0
    dropped = [layer for layer in sorted(layers) if layer >= n_layers - drafts] if drafts else []
    if dropped and len(dropped) < len(layers):
        for layer in dropped:
            del layers[layer]
        notes.append(
            f"layer {', '.join(map(str, dropped))} drafts tokens (MTP) and is left out: llama.cpp"
            " loads its experts only to draft"
        )
    n_expert = next(iter(layers[min(layers)].values())).dims[-1]
    if not 1 <= n_expert <= _MOST_EXPERTS:
        raise SimlabError(f"{path}: a layer with {n_expert:,} experts is more than simlab knows")
    experts = {
        layer: _experts(path, layer, parts, n_expert, notes)
        for layer, parts in sorted(layers.items())
    }
    k = _number(metadata.get(f"{arch}.expert_used_count"))
    if k is None or not 1 <= k <= n_expert:
        raise SimlabError(
            f"{path} does not say how many of its {n_expert} experts a token uses"
            f" ({arch}.expert_used_count)"
        )
    of_experts = {tensor.name for parts in layers.values() for tensor in parts.values()}
    skipped = tuple(f"blk.{layer}." for layer in dropped)
    other = sum(
        tensor.size
        for name, tensor in tensors.items()
        if name not in of_experts and not (skipped and name.startswith(skipped))
    )
    embedding = tensors.get("token_embd.weight")
    # a model without an output tensor uses the embedding's weights a second time, on the device
    tied = "output.weight" not in tensors
    return ModelShape(
        name=_printable(str(metadata.get("general.name") or path.stem)),
        source=str(path),
        n_expert=n_expert,
        k=k,
        n_layers=n_layers,
        experts=experts,
        other_bytes=other,
        input_bytes=embedding.size if embedding is not None and not tied else 0,
        metadata=metadata,
        notes=tuple(dict.fromkeys(notes)),
    )


def _printable(name: str) -> str:
    """A name that a terminal can be given."""
    return "".join(c if c.isprintable() else "?" for c in name)[:_LONGEST_NAME]


def _number(value: object) -> int | None:
    """A whole number of the metadata; of an array (one number a layer) the largest."""
    numbers = value if isinstance(value, list) else [value]
    whole = [each for each in numbers if isinstance(each, int) and not isinstance(each, bool)]
    return max(whole) if whole and len(whole) == len(numbers) else None


def _experts(
    path: Path, layer: int, parts: dict[str, TensorInfo], n_expert: int, notes: list[str]
) -> tuple[ExpertTensor, ...]:
    if "down" not in parts or not {"gate_up", "up"} & set(parts):
        raise SimlabError(
            f"{path}: layer {layer} has only {', '.join(sorted(parts))} of its expert tensors;"
            " download the model again"
        )
    result = []
    for name in _ORDER:
        if name not in parts:
            continue
        tensor = parts[name]
        if len(tensor.dims) != 3 or tensor.dims[2] != n_expert:
            raise SimlabError(
                f"{path}: {tensor.name} has dimensions {tensor.dims}, the model has {n_expert}"
                " experts a layer"
            )
        size, rest = divmod(tensor.size, n_expert)
        if not tensor.known:
            # offsets are padded: of a type that nobody knows, only a unique answer is believed
            if rest >= 32 or n_expert < 32 or size == 0:
                raise SimlabError(
                    f"{path}: {tensor.name} is of {tensor.type_name}, which simlab does not know;"
                    " update simlab, or pip install --upgrade gguf"
                )
            notes.append(
                f"{tensor.type_name} is unknown to simlab: bytes taken from the tensors' offsets"
            )
        result.append(ExpertTensor(name, tensor.type_name, (tensor.dims[0], tensor.dims[1]), size))
    return tuple(result)
