"""Router picks from torch models: the tiny demo model, and what runs and watches a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simlab.capture.hooks import Picks, Tap, attach
    from simlab.capture.watch import tracing

__all__ = ["Picks", "Tap", "attach", "tracing"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: it is asked for when it is used
    if name == "tracing":
        from simlab.capture.watch import tracing

        return tracing
    if name in ("Picks", "Tap", "attach"):
        from simlab.capture import hooks

        return getattr(hooks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
