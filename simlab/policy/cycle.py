"""Where a layer stands in the layer cycle: layers are visited in a fixed order, step after step."""

from __future__ import annotations

from typing import Any

from simlab.policy.jit import kernel_jit


@kernel_jit
def visits_ahead(layer: int, current: int, n_layers: int) -> Any:
    """Visits until ``layer`` comes again when ``current`` is being served: 1..n_layers."""
    distance = layer - current
    if distance <= 0:
        distance += n_layers
    return distance
