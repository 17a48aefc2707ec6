"""The experts of a model behind a slot pool: planned, uploaded and served, layer by layer.

For each layer of each step the picks reach the host, the replayer's own policy decides, the misses
are copied into their slots, and the weights that the layer then asks for are those that lie in the
slots. What was declined, or found no place on the large path, is copied into staging rows behind
the slots, used and dropped; with ``on_decline`` "cpu" declined experts are served from host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simlab.errors import SimlabError
from simlab.live.device import Device
from simlab.live.experts import ExpertLayer
from simlab.live.planner import GroupPlanner, Planner
from simlab.live.pool import SlotPool, Source
from simlab.model.layout import ExpertLayout
from simlab.policy.loader import Policy
from simlab.replay.kernel import DECLINED

if TYPE_CHECKING:
    import torch


@contextmanager
def hosted(layers: Sequence[ExpertLayer], device: Device) -> Iterator[None]:
    """The expert weights in host memory for the time of the block; where they were, afterwards.

    For ``cpu`` they are there already and nothing is copied. On a GPU they go layer by layer into
    pinned memory and leave the device, so no more than one tensor is there twice.

    Raises:
        SimlabError: host memory is short, or cannot be pinned.
    """
    moved: list[tuple[Any, Any]] = []
    try:
        for layer in layers if device.kind != "cpu" else ():
            for parameter in layer.parameters:
                what = f"the experts of layer {layer.site.layer}"
                host = device.pinned(parameter.shape, parameter.dtype, what)
                host.copy_(parameter.data)
                moved.append((parameter, parameter.device))
                parameter.data = host
        if moved:
            device.torch.cuda.empty_cache()
        yield
    finally:
        for parameter, place in moved:
            parameter.data = parameter.data.to(place)


@contextmanager
def placed(model: torch.nn.Module, device: Device) -> Iterator[None]:
    """What is left of a model without its experts on the device for the time of the block."""
    before = next(model.parameters()).device
    if before == device.place:
        yield
        return
    try:
        model.to(device.place)
        yield
    finally:
        model.to(before)


@dataclass(frozen=True, eq=False)
class Lookups:
    """What became of one layer of one step.

    Attributes:
        step: number of the step. layer: index among the MoE layers.
        experts: uint16 [n], distinct, in first-seen order. outcome: uint8 [n], codes of kernel.py.
        runs: merged uploads.
    """

    step: int
    layer: int
    experts: npt.NDArray[np.uint16]
    outcome: npt.NDArray[np.uint8]
    runs: int


class PooledExperts:
    """Slot pools for the layers of a model, and what was done with them.

    Args:
        layers: with their weights in host memory. layout: groups of the same layers.
        slots: of each group. on_decline: "stream" or "cpu".
        staging: rows for streamed experts, shared by the layers of a group; 1 or more.

    Attributes:
        log: of each access set. pool_bytes, staging_bytes: on the device.

    Raises:
        SimlabError: device memory is short. PolicyError: the policy cannot be used.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[ExpertLayer],
        layout: ExpertLayout,
        policy: Policy,
        slots: Sequence[int],
        *,
        params: Mapping[str, float],
        seed: int,
        on_decline: str,
        staging: int,
    ) -> None:
        self.device, self.layers, self.staging = device, list(layers), staging
        self.cpu_serves = on_decline == "cpu"
        self.planner = Planner(policy, layout, slots, params=params, seed=seed)
        uint8 = device.torch.uint8
        self.pools = [
            SlotPool(
                device,
                [(size,) for size in group.tensor_bytes],
                [uint8] * len(group.tensor_bytes),
                slots=count,
                staging=staging,
            )
            for group, count in zip(layout.groups, slots, strict=True)
        ]
        self.sources = []
        #: per layer and tensor: the rows of its group's pool in the layer's own type and shape
        self.rows: list[tuple[torch.Tensor, ...]] = []
        for layer in self.layers:
            weights = [p.detach() for p in layer.parameters]
            pool = self.pools[self.planner.at[layer.site.layer][0]]
            self.sources.append(Source([w.flatten(1).view(uint8) for w in weights]))
            self.rows.append(
                tuple(
                    tensor.view(w.dtype).view(len(tensor), *w.shape[1:])
                    for tensor, w in zip(pool.tensors, weights, strict=True)
                )
            )
        self.log: list[Lookups] = []
        sizes = [group.expert_bytes or 0 for group in layout.groups]
        self.pool_bytes = sum(n * size for n, size in zip(slots, sizes, strict=True))
        self.staging_bytes = staging * sum(sizes)
        self._bytes_before: list[int] = []

    def close(self) -> None:
        """Give the memory back, once nothing on the device uses it any more; counts stay."""
        self.device.synchronize()
        self._bytes_before.append(sum(pool.n_bytes for pool in self.pools))
        self.pools.clear()
        self.sources.clear()
        self.rows.clear()

    @property
    def steps(self) -> int:
        """Steps that began."""
        return len(self._bytes_before)

    def begin_step(self, tokens: int) -> None:
        """A forward pass over so many tokens begins."""
        self._bytes_before.append(sum(pool.n_bytes for pool in self.pools))
        self.planner.begin_step(tokens)

    def bytes_in(self, steps: int) -> int:
        """Bytes copied to the device in the first ``steps`` steps, once the pools are closed."""
        return self._bytes_before[steps]

    def serve(self, layer: int, picks: npt.NDArray[np.int64]) -> Served:
        """Plan one layer (index) and start its uploads.

        Args:
            picks: int64 [n], the picks of all tokens that run an expert, token by token.
        """
        site = self.layers[layer].site
        group, _ = self.planner.at[site.layer]
        if not len(picks):
            return Served(self, layer, {}, [], frozenset())
        plan = self.planner.plan(site.layer, picks)
        n, n_fill, n_run = plan.counts.tolist()
        experts, outcome = plan.experts[:n].copy(), plan.outcome[:n].copy()
        self.log.append(Lookups(self.steps - 1, layer, experts, outcome, n_run))
        if n_fill:
            self._upload(self.pools[group], self.sources[layer], plan, n_run)
        slots = plan.slots[:n]
        row_of = dict(zip(experts.tolist(), slots.tolist(), strict=True))
        on_cpu: frozenset[int] = frozenset()
        if self.cpu_serves:
            declined = (outcome == DECLINED) | (plan.group.slots == 0)
            on_cpu = frozenset(experts[declined].tolist())
        dropped = sorted(e for e, row in row_of.items() if row < 0 and e not in on_cpu)
        return Served(self, layer, row_of, dropped, on_cpu)

    def _upload(self, pool: SlotPool, source: Source, plan: GroupPlanner, n_run: int) -> None:
        pool.begin()
        with self.device.on(self.device.side):
            for expert, slot, count in plan.runs[:n_run].tolist():
                pool.upload(source, expert, slot, count)
        pool.end()

    def stream(self, layer: int, experts: Sequence[int]) -> dict[int, int]:
        """Copy experts into the staging rows, at most ``staging`` of them; expert -> row."""
        pool = self.pools[self.planner.at[self.layers[layer].site.layer][0]]
        rows = {expert: pool.slots + i for i, expert in enumerate(experts)}
        pool.begin()
        with self.device.on(self.device.side):
            for expert, row in rows.items():
                pool.upload(self.sources[layer], expert, row)
        pool.end()
        return rows


class Served:
    """The experts of one layer for the time of one call.

    Attributes:
        row_of: expert -> row of the pool's tensors, -1 where it is in none yet.
        streamed: the experts that pass through the staging rows, ascending.
        on_cpu: those that are computed from host memory.
    """

    def __init__(
        self,
        pooled: PooledExperts,
        layer: int,
        row_of: dict[int, int],
        streamed: list[int],
        on_cpu: frozenset[int],
    ) -> None:
        self._pooled, self._layer = pooled, layer
        self.row_of, self.streamed, self.on_cpu = row_of, streamed, on_cpu
        self._staged: dict[int, int] = {}

    def weight(self, tensor: int, expert: int) -> torch.Tensor:
        """One tensor of one expert, to be used before the next one is asked for."""
        row = self.row_of.get(expert)
        if row is None:
            site = self._pooled.layers[self._layer].site
            raise SimlabError(
                f"layer {site.layer} ({site.path}) asked for expert {expert}, which its router did"
                " not pick"
            )
        if expert in self.on_cpu:
            return self.host_weight(tensor, expert)
        if row < 0:
            row = self._stage(expert)
        return self._pooled.rows[self._layer][tensor][row]

    def host_weight(self, tensor: int, expert: int) -> torch.Tensor:
        """The same in host memory."""
        return self._pooled.layers[self._layer].parameters[tensor].detach()[expert]

    def stage_all(self) -> dict[int, int]:
        """All streamed experts in the staging rows at once, which must be enough; expert -> row."""
        if self.streamed:
            self.row_of |= self._pooled.stream(self._layer, self.streamed)
        return self.row_of

    def _stage(self, expert: int) -> int:
        """The row of a streamed expert, brought together with those that come after it."""
        if expert not in self._staged:
            first = self.streamed.index(expert)
            wave = self.streamed[first : first + self._pooled.staging]
            self._staged = self._pooled.stream(self._layer, wave)
        return self._staged[expert]
