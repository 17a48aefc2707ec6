"""Milliseconds a token: dense part + experts' compute + uploads.

    ms = steps x step_ms + lookups x lookup_ms + (1 - overlap) x uploads
    uploads = bytes / bandwidth + copies x latency

over decode steps, divided by their tokens. ``step_ms`` is what a step takes whatever the cache does
(dense layers, router ids to the host, launches), ``lookup_ms`` the compute of one expert of one
layer, ``overlap`` the share of the upload time that is hidden behind compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from simlab.cost.link import LinkProfile
from simlab.errors import SimlabError, UsageError
from simlab.model.layout import ExpertLayout
from simlab.result.schema import Result


@dataclass(frozen=True)
class Work:
    """What decode steps ask of a device: ``n_bytes`` and ``copies`` cross the link."""

    steps: int
    tokens: int
    lookups: int
    n_bytes: int
    copies: int


@dataclass(frozen=True)
class Costs:
    """The model's parameters; see the module. ``source`` says where they come from."""

    bandwidth_gb_s: float
    latency_us: float
    step_ms: float = 0.0
    lookup_ms: float = 0.0
    overlap: float = 0.0
    source: str = ""

    def upload_ms(self, work: Work) -> float:
        """Time of the copies of ``work``, before overlap."""
        return work.n_bytes / self.bandwidth_gb_s / 1e6 + work.copies * self.latency_us / 1e3

    def ms_per_token(self, work: Work) -> float:
        """Mean milliseconds per token of ``work``."""
        total = work.steps * self.step_ms + work.lookups * self.lookup_ms
        return (total + (1 - self.overlap) * self.upload_ms(work)) / work.tokens

    def to_dict(self) -> dict[str, Any]:
        """For the provenance of a prediction."""
        return dict(vars(self))


def costs_of(link: LinkProfile) -> Costs:
    """Uploads as the link's profile has them; all else is free until it is calibrated."""
    source = f"link profile of {link.name}" + (f" ({link.note})" if link.note else "")
    return Costs(link.bandwidth_gb_s, link.latency_us, source=source)


def calibrated(costs: Costs, points: Sequence[tuple[Work, float]]) -> Costs:
    """``step_ms`` from measured points (work, ms per token): what the other terms leave, a step.

    It is not below 0: copies that were faster than the link's profile do not make steps negative.

    Raises:
        SimlabError: no point has a decode step.
    """
    steps = sum(work.steps for work, _ in points)
    if not steps:
        raise SimlabError("nothing to calibrate on: no measured point has a decode step")
    without = replace(costs, step_ms=0.0)
    left = sum((ms - without.ms_per_token(work)) * work.tokens for work, ms in points)
    return replace(costs, step_ms=max(0.0, left / steps))


def work_of(row: Result, layout: ExpertLayout) -> Work:
    """The decode steps of a result row; all its steps when it has no decode step.

    Copies are one per expert tensor and merged run, and one per tensor of a streamed expert; where
    groups differ in their number of tensors, their mean over the uploads is taken.

    Raises:
        UsageError: the expert bytes are unknown.
    """
    part = row.by_phase.get("decode")
    part = part if part is not None and part.tokens else row.counters
    if part.bytes_moved is None or not all(group.tensor_bytes for group in layout.groups):
        raise UsageError("milliseconds need the expert bytes: import the trace with --expert-bytes")
    tensors = {layer: len(g.tensor_bytes) for g in layout.groups for layer in g.layers}
    moved = [(x["demand_uploads"] + x["streamed"], tensors[x["layer"]]) for x in row.by_layer]
    total = sum(n for n, _ in moved)
    mean = sum(n * each for n, each in moved) / total if total else 0.0
    runs = part.demand_uploads if part.merged_runs is None else part.merged_runs
    return Work(
        steps=part.steps,
        tokens=part.tokens,
        lookups=part.lookups,
        n_bytes=part.bytes_moved,
        copies=round((runs + part.streamed) * mean),
    )


def predicted_row(row: Result, costs: Costs, work: Work) -> Result:
    """A simulated row with the time that the model gives it."""
    ms = costs.ms_per_token(work)
    timing = {
        "tokens_per_s": 1e3 / ms if ms > 0 else None,
        "upload_ms_per_token": costs.upload_ms(work) / work.tokens,
        "costs": costs.to_dict(),
        "tokens": work.tokens,
    }
    return replace(row, kind="predicted", ms_per_token=ms, timing=timing)
