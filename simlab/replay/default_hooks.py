"""What a hook does when a policy does not define it: nothing (and ``admit`` says yes).

The generated module of a policy imports the missing hooks from here; ``victim`` has no default.
"""

from __future__ import annotations

from typing import Any

from simlab.policy.jit import kernel_jit


@kernel_jit
def on_step(state: Any, cache: Any, group: Any, tokens: int) -> None:
    """A step begins."""


@kernel_jit
def on_set(state: Any, cache: Any, group: Any, layer: int, experts: Any) -> None:
    """The access set of a layer is known."""


@kernel_jit
def on_hit(state: Any, cache: Any, group: Any, key: int) -> None:
    """A member of the set is resident."""


@kernel_jit
def on_miss(state: Any, cache: Any, group: Any, key: int) -> None:
    """A member of the set is not resident."""


@kernel_jit
def victim(state: Any, cache: Any, group: Any, key: int) -> int:
    """Required of every policy; this one is never a valid answer."""
    return -1


@kernel_jit
def admit(state: Any, cache: Any, group: Any, key: int, victim: int) -> bool:
    """Fill always."""
    return True


@kernel_jit
def on_evict(state: Any, cache: Any, group: Any, key: int) -> None:
    """A key has left."""


@kernel_jit
def on_insert(state: Any, cache: Any, group: Any, key: int) -> None:
    """A key has been given a slot."""
