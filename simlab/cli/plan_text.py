"""Plans, napkins and the catalogue as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simlab.model.napkin import Napkin
    from simlab.model.placement import Placement
    from simlab.model.plan import GroupPlan, Plan

_MIB, _GIB = 2**20, 2**30


def _heading(placement: Placement) -> Iterator[str]:
    shape, layout = placement.shape, placement.layout
    yield f"{shape.name}  ({shape.source})"
    yield (
        f"{len(shape.experts)} MoE layers x {shape.n_expert} experts, {shape.k} a token;"
        f" {shape.expert_bytes / _GIB:,.2f} GiB of experts"
    )
    if layout.resident:
        hosted = sum(shape.layer_bytes(layer) for layer in layout.layers)
        yield (
            f"{len(layout.layers)} layers in host memory ({hosted / _GIB:,.2f} GiB), the experts of"
            f" {len(layout.resident)} stay on the device"
        )


def plan_lines(placement: Placement, plan: Plan, notes: Sequence[str]) -> Iterator[str]:
    """A plan, line by line."""
    from simlab.model.layout import spans

    yield from _heading(placement)
    allocated = sum(each.bank for each in plan.groups)
    yield (
        f"\n--moe-cache-mib {plan.mib:g}: {allocated / _MIB:,.2f} MiB allocated,"
        f" {100 * plan.share:.1f} % of the experts in host memory"
    )
    yield f"floor: {plan.floor:,} MiB starts llama.cpp" + (
        f", {plan.floor_all:,} MiB caches every group" if plan.floor_all != plan.floor else ""
    )
    streams = "" if plan.concurrency == 1 else f" at {plan.concurrency} streams"
    for number, each in enumerate(plan.groups, 1):
        group = each.group
        device = f", device {group.device}" if len(placement.split) > 1 else ""
        count = len(group.layers)
        yield (
            f"\ngroup {number}{device}: {count} layer{'s' * (count > 1)} ({spans(group.layers)}),"
            f" {sum(group.tensor_bytes):,} bytes an expert"
        )
        yield f"  tensors  {_tensors(placement, each)}"
        yield f"  slots    {each.slots:,} of {each.keys:,} ({100 * each.share:.1f} %)"
        low, high = each.cycle.low, each.cycle.high
        width = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        yield f"  cycle T  {width}{streams}; one stream hits nothing up to {each.cliff:,} slots"
    if plan.warnings or notes:
        yield ""
    yield from (f"warning: {warning}" for warning in plan.warnings)
    yield from (f"note: {note}" for note in notes)


def _tensors(placement: Placement, each: GroupPlan) -> str:
    parts = placement.shape.experts[each.group.layers[0]]
    return " + ".join(f"{part.name} {part.type_name} {part.size:,}" for part in parts)


def napkin_lines(placement: Placement, napkin: Napkin) -> Iterator[str]:
    """The article's arithmetic, line by line."""
    yield from _heading(placement)
    yield f"\none expert         {napkin.expert_bytes / _MIB:.2f} MiB"
    yield f"all experts        {napkin.n_experts:,} experts, {napkin.total_bytes / _GIB:.1f} GiB"
    yield (f"touched per token  {napkin.touched:,} experts, {napkin.token_bytes / _MIB:,.0f} MiB")
    yield "\nover the link, at its specified speed and before any compute:"
    for each in napkin.crossings:
        ceiling = "no limit" if each.tok_s is None else f"at most {each.tok_s:,.0f} tok/s"
        yield (
            f"  {each.link:<13} {100 * each.hit_rate:5.1f} % hits  {each.mib:7,.0f} MiB"
            f"  {each.ms:6.1f} ms  {ceiling}"
        )
    yield "\ncomputed, neither simulated nor measured; real copies reach about 70-85 % of a link"


def catalogue_lines(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line a model; what no source states is shown as ?."""
    width = max(map(len, entries))
    for name, entry in entries.items():
        shown = [entry.get(key, "?") for key in ("moe_layers", "n_expert", "k", "hidden", "inter")]
        yield (
            f"{name:<{width}}  layers {shown[0]}, {shown[1]} experts, {shown[2]} a token,"
            f" hidden {shown[3]}, width {shown[4]}, {entry.get('dtype', '?')}"
        )
