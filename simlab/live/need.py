"""The optional package that live mode needs, asked for when it is needed."""

from __future__ import annotations

from types import ModuleType

from simlab.errors import UsageError


def need_torch(command: str) -> ModuleType:
    """Import torch.

    Raises:
        UsageError: it is not installed; says in one line what to install.
    """
    try:
        import torch
    except ImportError:
        raise UsageError(f"simlab {command} needs torch: pip install 'simlab[capture]'") from None
    module: ModuleType = torch
    return module
