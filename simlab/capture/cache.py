"""Rows of a model's cache: several requests of different lengths in one batch.

A batch is padded on the left, so that all requests end at the same column: rows are joined by
padding the shorter ones, and the padding that no row needs any more is cut off. Padding is masked;
it never changes what is computed for a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from simlab.errors import UsageError

if TYPE_CHECKING:
    import torch


def new_cache(model: torch.nn.Module) -> Any:
    """An empty cache with the layers that the model's configuration asks for."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def check_joinable(cache: Any, name: str) -> None:
    """Raise UsageError unless rows of this cache can be put together and taken apart."""
    from transformers import cache_utils as cu

    known = (cu.DynamicLayer, cu.LinearAttentionLayer, getattr(cu, "DummyLayer", cu.DynamicLayer))
    indexed = getattr(cu, "DynamicIndexedLayer", ())
    for layer in cache.layers:
        if not isinstance(layer, known) or isinstance(layer, indexed):
            raise UsageError(
                f"{name} keeps a cache ({type(layer).__name__}) that simlab cannot batch: leave out"
                " --batch and --concurrency"
            )


def recurrent(cache: Any) -> bool:
    """Whether a layer keeps a running state, into which padding between chunks would leak."""
    return any(hasattr(layer, "recurrent_states") for layer in cache.layers)


def keep(cache: Any, rows: Sequence[int], width: int) -> None:
    """Keep these rows, in this order, and their last ``width`` columns."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[list(rows)]

    for layer in cache.layers:
        _attention(layer, width, take)
        _states(layer, lambda _name, _i, tensor: take(tensor))


def join(cache: Any, other: Any, width: int) -> None:
    """Add the rows of ``other`` below those of ``cache``; both get ``width`` columns."""
    import torch

    for layer, more in zip(cache.layers, other.layers, strict=True):
        _attention(layer, width)
        _attention(more, width)
        if getattr(layer, "keys", None) is not None:
            layer.keys = torch.cat([layer.keys, more.keys])
            layer.values = torch.cat([layer.values, more.values])

        def beside(name: str, i: int, tensor: torch.Tensor, more: Any = more) -> torch.Tensor:
            return torch.cat([tensor, getattr(more, name)[i]])

        _states(layer, beside)


def _attention(
    layer: Any, width: int, take: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
) -> None:
    """Rows and columns of an attention layer's keys and values, [rows, heads, columns, size]."""
    if getattr(layer, "keys", None) is None:
        return  # recurrent, or one that shares the keys of another layer
    window = getattr(layer, "sliding_window", None)
    columns = width if window is None else min(width, window - 1)
    layer.keys = _fit(take(layer.keys), columns)
    layer.values = _fit(take(layer.values), columns)
    if window is not None:
        layer.cumulative_length = width


def _fit(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    import torch

    have = tensor.shape[-2]
    if have > columns:
        return tensor[..., have - columns :, :]
    if have < columns:
        return torch.nn.functional.pad(tensor, (0, 0, columns - have, 0))
    return tensor


def _states(layer: Any, change: Callable[[str, int, torch.Tensor], torch.Tensor]) -> None:
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name, None) or {}
        for i, tensor in states.items():
            if tensor is not None:
                states[i] = change(name, i, tensor)
