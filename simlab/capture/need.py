"""The optional packages that capturing needs, asked for when they are needed."""

from __future__ import annotations

from simlab.errors import UsageError


def need_torch() -> None:
    """Raise UsageError, in one line, where torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UsageError("simlab capture needs torch: pip install 'simlab[capture]'") from None
