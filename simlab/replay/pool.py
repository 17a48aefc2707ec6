"""One pool through a run: its geometry, its state, the kernel calls, and what a policy broke."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simlab.errors import PolicyError, SimlabError
from simlab.policy.loader import Policy
from simlab.policy.protocol import Cache, Group, new_cache
from simlab.replay import kernel
from simlab.replay.access import EVERY_PICK, Access
from simlab.replay.cell import Cell, Outcomes
from simlab.replay.compile import CompiledPolicy

if TYPE_CHECKING:
    from simlab.replay.run import Replayer

#: Access sets per kernel call: often enough for a progress bar and Ctrl-C, rare enough to cost
#: nothing.
CHUNK = 500_000


def run_pool(
    replayer: Replayer,
    compiled: CompiledPolicy,
    cell: Cell,
    members: Sequence[int],
    by_step: npt.NDArray[np.int64],
    found: Outcomes,
    progress: Callable[[int], None] | None,
) -> int:
    """Replay the access sets of one pool and write what became of each lookup into ``found``.

    Args:
        members: its layers, as positions. by_step: int64 [steps], its slots in each step.
        progress: called with the number of access sets done since the last call.

    Returns:
        The most bytes resident at once (``bmoe``; else 0).

    Raises:
        PolicyError: the policy broke the protocol; names policy, key and event.
    """
    meta, access, policy = replayer.trace.meta, found.access, cell.policy
    batches = replayer.semantics == "bmoe"
    index_in_group = np.full(len(meta.moe_layers), -1, np.int32)
    index_in_group[members] = np.arange(len(members))
    keys = len(members) * meta.n_expert
    slots = int(by_step.max(initial=0))
    group = Group(
        layers=len(members),
        experts=meta.n_expert,
        keys=keys,
        slots=slots,
        k=meta.k,
        lookups=len(access.experts),
        seed=replayer.seed,
    )
    served = replayer.on_cached_path(access, by_step)
    needed = replayer.needs.of(policy, access, cell.concurrency, index_in_group, group, served)
    capacity = keys if batches else slots
    cache = new_cache(group, capacity, next_use=policy.reads_future, weights=policy.reads_weights)
    unit = kernel.PER_PICK if replayer.order == EVERY_PICK else kernel.WHOLE_SET
    if replayer.semantics == "sglang":
        unit = kernel.WAVES
        if policy.reads_future:
            cache.next_use[:] = _first_uses(access, members[0], group)
    sizes = np.zeros(len(members), np.int64)
    if replayer.layer_bytes is not None:
        sizes[:] = np.asarray(replayer.layer_bytes)[members]
    state = policy.new_state(
        group,
        cell.params,
        uses=needed.uses,
        layer_bytes=None if replayer.layer_bytes is None else sizes,
    )
    pool = np.array([cell.budget_bytes or 0, 0, 0], np.int64)
    longest = max(1, access.largest)
    fills = np.zeros((longest, 3), np.int32)
    order = np.zeros(longest, np.uint32)
    line, place = np.zeros(longest, np.uint16), np.zeros(longest, np.int32)
    line_outcome = np.zeros(longest, np.uint8)
    sets = (
        access.set_step, access.set_layer, access.offsets, access.experts, needed.next_use,
        needed.weights, access.step_tokens,
    )  # fmt: skip
    results = (policy.protects_present, found.outcome, found.runs, fills)
    step_of = access.set_step
    # steps that begin with another capacity; of step_of's type, or searchsorted would convert that
    changes = (np.flatnonzero(np.diff(by_step)) + 1).astype(step_of.dtype)
    limits = [*np.searchsorted(step_of, changes).tolist(), len(step_of)]
    last = 0
    while last < len(step_of):
        first = last
        last = min(first + CHUNK, next(limit for limit in limits if limit > first))
        # never in the middle of a step
        last = int(np.searchsorted(step_of, step_of[last - 1], side="right"))
        now = int(by_step[step_of[first]])
        try:
            if now != group.slots and not batches:
                group = group._replace(slots=now)
                if compiled.resize(state, cache, group, now, fills) < 0:
                    raise PolicyError(
                        f"policy {policy.name} ({policy.path}) named a victim that is not resident"
                        f" (key {fills[0, 0]}) as its pool shrank to {now} slots at step"
                        f" {step_of[first]}"
                    )
            if batches:
                stopped = compiled.replay_batches(
                    state, cache, group, first, last, *sets, sizes, pool, *results
                )
            else:
                stopped = compiled.replay(
                    state, cache, group, first, last, *sets, index_in_group, unit, replayer.gate,
                    *results, order, line, place, line_outcome,
                )  # fmt: skip
        except (ArithmeticError, ValueError, LookupError, AssertionError) as exc:
            raise PolicyError(
                f"policy {policy.name} ({policy.path}) failed: {type(exc).__name__}: {exc}"
            ) from None
        if stopped >= 0:
            raise PolicyError(_broke(replayer, policy, access, stopped, members, fills))
        if progress is not None:
            progress(last - first)
    _check_cache(cache, policy, group.slots if not batches else keys)
    return int(pool[2])


def _first_uses(access: Access, layer: int, group: Group) -> npt.NDArray[np.int64]:
    """Position of each key's first lookup; lookups + key if there is none. One layer a pool."""
    found = np.arange(group.keys, dtype=np.int64) + group.lookups
    of_layer = np.repeat(access.set_layer == layer, np.diff(access.offsets))
    positions = np.flatnonzero(of_layer)
    keys, first = np.unique(access.experts[positions], return_index=True)
    found[keys] = positions[first]
    return found


def _broke(
    replayer: Replayer,
    policy: Policy,
    access: Access,
    stopped: int,
    members: Sequence[int],
    fills: npt.NDArray[np.int32],
) -> str:
    key, code = int(fills[0, 0]), int(fills[0, 1])
    layers, n_expert = replayer.trace.meta.moe_layers, replayer.trace.meta.n_expert
    if 0 <= key < len(members) * n_expert:
        named = f"layer {layers[members[key // n_expert]]}, expert {key % n_expert}"
    else:
        named = f"key {key}, which does not exist"
    why = "is not resident" if code == kernel.NOT_RESIDENT else "belongs to the present set"
    return (
        f"policy {policy.name} ({policy.path}) named a victim that {why} ({named}) at step"
        f" {int(access.set_step[stopped])}, layer {layers[access.set_layer[stopped]]}"
    )


def _check_cache(cache: Cache, policy: Policy, capacity: int) -> None:
    """Used slots and slot maps agree (conservation of residents)."""
    used = capacity - int(cache.n_free[0])
    if int((cache.slot_of >= 0).sum()) != used:
        raise SimlabError(
            f"internal error: slot map of {policy.name} does not match the used slots"
        )
