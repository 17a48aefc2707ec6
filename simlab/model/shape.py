"""A model as the planner sees it: the experts of each layer, before it is said where they live.

A GGUF file, a Hugging Face config and the catalogue all end here; ``layout_for`` then places the
layers, and groups them as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simlab.errors import UsageError
from simlab.model.layout import ExpertGroup, ExpertLayout, spans


@dataclass(frozen=True)
class ExpertTensor:
    """One expert's part of a tensor.

    Attributes:
        name: ``gate_up``, ``gate``, ``up`` or ``down``. type_name: its GGML type.
        shape: (values of a row, rows). size: bytes, unpadded.
    """

    name: str
    type_name: str
    shape: tuple[int, int]
    size: int


@dataclass(frozen=True)
class ModelShape:
    """What is known of a model's experts.

    Attributes:
        name: the model's name. source: the file, config or catalogue entry it comes from.
        n_expert: routed experts of a layer. k: experts of a token in a layer.
        n_layers: all its layers, dense ones too.
        experts: MoE layer -> its expert tensors, in the order gate_up, gate, up, down.
        other_bytes: bytes of all other tensors; None when unknown (not a GGUF file).
        input_bytes: of those, the token embedding's, which llama.cpp leaves in host memory.
        metadata: a GGUF file's short metadata values.
        notes: what a reader of the figures should know.
    """

    name: str
    source: str
    n_expert: int
    k: int
    n_layers: int
    experts: Mapping[int, tuple[ExpertTensor, ...]]
    other_bytes: int | None = None
    input_bytes: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return self.n_expert * sum(t.size for layer in self.experts.values() for t in layer)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of all experts of one layer."""
        return self.n_expert * sum(tensor.size for tensor in self.experts[layer])


def layout_for(
    shape: ModelShape,
    *,
    host_layers: Sequence[int] | None = None,
    devices: Sequence[int] | None = None,
) -> ExpertLayout:
    """The groups of a model's layers: same device, same types, shapes and bytes of the experts.

    Args:
        host_layers: MoE layers whose experts are in host memory; default all. The others' stay on
            the device.
        devices: device of each of the model's layers; default all on device 0.

    Raises:
        UsageError: no such layer, or no layer is left in host memory.
    """
    hosted = sorted(shape.experts if host_layers is None else set(host_layers))
    strange = [layer for layer in hosted if layer not in shape.experts]
    if strange:
        raise UsageError(
            f"{shape.name} has no MoE layer {spans(strange)}; its MoE layers are"
            f" {spans(sorted(shape.experts))}"
        )
    if not hosted:
        raise UsageError("no layer has its experts in host memory: there is nothing to cache")
    members: dict[tuple[int, tuple[ExpertTensor, ...]], list[int]] = {}
    for layer in hosted:
        device = devices[layer] if devices is not None else 0
        members.setdefault((device, shape.experts[layer]), []).append(layer)
    return ExpertLayout(
        n_expert=shape.n_expert,
        k=shape.k,
        groups=tuple(
            ExpertGroup(
                layers=tuple(layers),
                tensor_bytes=tuple(tensor.size for tensor in tensors),
                types=tuple(tensor.type_name for tensor in tensors),
                device=device,
            )
            for (device, tensors), layers in members.items()
        ),
        resident=tuple(sorted(set(shape.experts) - set(hosted))),
    )
