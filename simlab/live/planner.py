"""What an engine's cache decides, layer by layer: the replayer's own compiled policy, called live.

A `Planner` holds one `GroupPlanner` per group. It calls ``plan_layer`` of replay/kernel.py, which
is compiled from the same policy, the same gate and the same ``_plan_set`` as the replayer's loop;
all it knows is the picks of the present layer. Buffers are made once: planning allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.errors import PolicyError, SimlabError, UsageError
from simlab.model.layout import ExpertLayout
from simlab.policy.loader import Policy
from simlab.policy.protocol import Group, new_cache
from simlab.replay import kernel
from simlab.replay.compile import compile_plan_layer

#: Most tokens of a step on the cached path under the ``llama.cpp`` semantics.
GATE_TOKENS = 32


class GroupPlanner:
    """The cache of one group: the policy's state, the slot map, and what the last plan said.

    Args:
        policy: a loaded policy. One that reads the future is refused: no engine could run it.
        layers: layers of the group. slots: its capacity, 0 or more. expert_bytes: of one of its
            experts, if known.

    Attributes:
        experts: uint16 [n_expert], the layer's distinct picks in first-seen order.
        outcome: uint8 [n_expert], what became of each: codes of replay/kernel.py.
        slots: int64 [n_expert], the slot of each, -1 without one.
        fills: int32 [n_expert, 3], uploads as (expert, slot, victim key or -1), expert ascending.
        runs: int32 [n_expert, 3], the same merged: (first expert, first slot, how many).
        counts: int64 [3], how many entries of the above hold: experts, fills, runs.

    Raises:
        UsageError: the policy is a bound. PolicyError: it cannot be compiled, or init failed.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        layers: int,
        n_expert: int,
        k: int,
        slots: int,
        params: Mapping[str, float] | None = None,
        seed: int = 0,
        expert_bytes: int | None = None,
        gate_tokens: int = GATE_TOKENS,
    ) -> None:
        if policy.bound:
            raise UsageError(
                f"policy {policy.name} knows the future; live runs what an engine could run"
            )
        if policy.reads_weights:
            raise UsageError(f"policy {policy.name} needs router weights, which live does not have")
        self.policy, self.layers, self.gate_tokens = policy, layers, gate_tokens
        keys = layers * n_expert
        # the horizon of next_use is unknown here, and only policies that are refused read it
        self.group = Group(layers, n_expert, keys, slots, k, lookups=0, seed=seed)
        self.cache = new_cache(self.group, slots)
        self.state = policy.new_state(
            self.group,
            params or {},
            layer_bytes=np.full(layers, expert_bytes, np.int64) if expert_bytes else None,
        )
        self.experts = np.zeros(n_expert, np.uint16)
        self.outcome = np.zeros(n_expert, np.uint8)
        self.slots = np.zeros(n_expert, np.int64)
        self.fills = np.zeros((n_expert, 3), np.int32)
        order = np.zeros(n_expert, np.uint32)
        self.runs = np.zeros((n_expert, 3), np.int32)
        self.counts = np.zeros(3, np.int64)
        self._plan, self._protect = compile_plan_layer(policy), policy.protects_present
        self._before = (self.state, self.cache, self.group)
        self._after = (
            np.zeros(n_expert + 1, np.int64),
            self.experts, self.outcome, self.slots, self.fills, order, self.runs, self.counts,
        )  # fmt: skip
        self._begins = True

    def begin_step(self) -> None:
        """The next plan belongs to a new step."""
        self._begins = True

    def plan(self, layer: int, picks: npt.NDArray[np.int64], tokens: int) -> None:
        """Decide for one layer of one step; the answer is in the attributes.

        Args:
            layer: index in the group.
            picks: int64 [n], contiguous: the picks of all the step's tokens, token by token.
            tokens: tokens of the step, which the gate looks at.

        Raises:
            PolicyError: the policy failed or broke the protocol. SimlabError: a pick is no expert.
        """
        try:
            code = self._plan(
                *self._before,
                layer,
                tokens,
                self._begins,
                self.gate_tokens,
                self._protect,
                picks,
                *self._after,
            )
        except (ArithmeticError, ValueError, LookupError, AssertionError) as exc:
            raise PolicyError(
                f"policy {self.policy.name} ({self.policy.path}) failed:"
                f" {type(exc).__name__}: {exc}"
            ) from None
        if code < 0:
            raise self._broke(code)
        self._begins = False

    @property
    def is_large(self) -> bool:
        """The last plan took the large path: the pool was read, neither touched nor filled."""
        return bool(self.counts[0] and self.outcome[0] >= kernel.LARGE_HIT)

    @property
    def resident(self) -> npt.NDArray[np.int32]:
        """int32 [slots], the key (layer in group * n_expert + expert) in each slot, -1 if empty."""
        return self.cache.key_of

    def _broke(self, code: int) -> SimlabError:
        bad = int(self.fills[0, 0])
        if code == kernel.NO_SUCH_EXPERT:
            pick = int(self.counts[0])
            return SimlabError(f"a router picked expert {pick} of {self.group.experts}")
        why = "is not resident" if code == kernel.NOT_RESIDENT else "belongs to the present set"
        return PolicyError(
            f"policy {self.policy.name} ({self.policy.path}) named a victim that {why} (key {bad})"
        )


class Planner:
    """All groups of a layout.

    Args:
        slots: slots of each group, in group order.
        others: params, seed and gate_tokens of GroupPlanner; each group starts from the same seed.

    Attributes:
        groups: one GroupPlanner a group.
        at: model layer number -> (group, index of the layer in the group).
    """

    def __init__(
        self, policy: Policy, layout: ExpertLayout, slots: Sequence[int], **others: Any
    ) -> None:
        self.groups = [
            GroupPlanner(
                policy,
                layers=len(group.layers),
                n_expert=layout.n_expert,
                k=layout.k,
                slots=n,
                expert_bytes=group.expert_bytes,
                **others,
            )
            for group, n in zip(layout.groups, slots, strict=True)
        ]
        self.at = {
            layer: (g, i)
            for g, group in enumerate(layout.groups)
            for i, layer in enumerate(group.layers)
        }
        self._tokens = 0

    def begin_step(self, tokens: int) -> None:
        """A step of so many tokens begins."""
        self._tokens = tokens
        for group in self.groups:
            group.begin_step()

    def plan(self, layer: int, picks: npt.NDArray[np.int64]) -> GroupPlanner:
        """Decide for one layer (the model's number) of the present step; picks as in GroupPlanner.

        Returns:
            The group's planner, which holds the answer until the next plan.
        """
        number, index = self.at[layer]
        group = self.groups[number]
        group.plan(index, picks, self._tokens)
        return group
