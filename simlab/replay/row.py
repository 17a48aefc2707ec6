"""The result row of a cell: counters, rates, what was simulated, and provenance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simlab.model.budget import MIB
from simlab.model.layout import spans
from simlab.replay.access import Access
from simlab.replay.account import Account, account
from simlab.replay.cell import Cell, Outcomes
from simlab.replay.provenance import provenance
from simlab.result.schema import Result
from simlab.trace.schema import PREFILL

if TYPE_CHECKING:
    from simlab.replay.run import Replayer


def result_row(replayer: Replayer, cell: Cell, outcomes: Outcomes, started: float) -> Result:
    """Add up a cell's outcomes and put everything that identifies them beside the figures.

    Args:
        started: seconds since the epoch, for the provenance.
    """
    found = account(
        replayer.trace,
        outcomes.access,
        outcomes.outcome,
        outcomes.runs,
        replayer.layer_bytes,
        on_decline=replayer.on_decline,
        uncached_layers=outcomes.uncached,
    )
    return row_of(replayer, cell, outcomes.access, found, started, outcomes.peak_bytes)


def row_of(
    replayer: Replayer,
    cell: Cell,
    access: Access,
    found: Account,
    started: float,
    peak_bytes: int | None = None,
) -> Result:
    """The row of a cell whose outcomes are added up; arguments as in result_row and Outcomes."""
    meta, layout, policy = replayer.trace.meta, replayer.layout, cell.policy
    total = found.total
    decode = found.by_phase["decode"]
    per_token = decode if decode.tokens else total
    produced = per_token.tokens
    if decode.tokens and access.schedule.produced is not None:
        produced = access.schedule.produced  # a step verifies more tokens than it produces
    # the largest pool stands for the cycle and the cliff: slots are per pool
    largest = max(replayer.pools, key=len)
    distinct = replayer.distinct(cell.concurrency)
    low, median, high = replayer.cycle(cell.concurrency)
    decoded = distinct.step_tokens[distinct.step_phase != PREFILL]
    one_stream = decoded.max(initial=1) == 1
    cliff = (len(largest) - 1) * meta.k if one_stream else median
    largest_slots = len(largest) * meta.n_expert
    slots, share, capacity_bytes = room_of(replayer, cell)
    notes = list(cell.notes)
    if replayer.semantics == "per-pick" and cell.concurrency > 1:
        notes.append("per-pick accounting inflates hits at concurrency > 1")
    if replayer.semantics == "sglang":
        notes.append("sglang: a model of SGLang's paged experts, not checked against SGLang")
        if policy.bound and policy.protects_present and access.largest > min(cell.slots):
            notes.append("sets larger than a pool are served in waves: not a proven bound")
    if replayer.semantics == "bmoe" and policy.bound and len(set(replayer.layer_bytes or ())) > 1:
        notes.append("experts of unequal bytes in one pool: not a bound")
    if replayer.capacity is not None:
        shares = [100 * float(share) for share in replayer.capacity.shares]
        if replayer.capacity.steps[0] > 0:
            shares.append(100.0)
        notes.append(
            f"the pools' capacity varies over time, from {min(shares):.0f} % to {max(shares):.0f} %"
            " of their slots: needs an engine that lends them"
        )
    if replayer.draft:
        notes.append(
            f"APPROXIMATE: {replayer.draft} drafted tokens a step and stream, of which"
            f" {100 * replayer.acceptance:g} % are accepted one after the other; a trace has no"
            " rejected tokens, so they are taken to pick what the text's next tokens pick"
        )
    if replayer.pin:
        chosen = "this trace itself told which: hindsight" if replayer.hindsight else "as told"
        notes.append(f"{replayer.pin} experts of each layer are pinned ({chosen})")
    if replayer.layout_name:
        notes.append(f"groups and bytes: {replayer.layout_name}, not those of the trace")
    if layout.resident:
        notes.append(f"the experts of layers {spans(layout.resident)} stay on the device")
    if meta.partial:
        notes.append("the trace is marked partial")
    return Result(
        ubatch=replayer.ubatch,
        trace_hash=meta.content_hash,
        layout_hash=layout.hash,
        trace_name=replayer.trace_name,
        model=meta.model,
        synthetic=meta.kind == "synthetic",
        policy=policy.name,
        policy_version=policy.version,
        policy_hash=policy.hash,
        params=policy.values(cell.params),
        bound=policy.bound,
        needs_engine_change=policy.declines and not policy.bound,
        semantics=replayer.semantics,
        pool=replayer.pool + (f", {replayer.pin} pinned a layer" if replayer.pin else ""),
        on_decline=replayer.on_decline,
        prefill=replayer.prefill,
        schedule=_schedule(replayer, access.schedule.n_steps),
        concurrency=cell.concurrency,
        slots=slots,
        n_keys=layout.n_keys,
        slots_share=share,
        capacity_bytes=capacity_bytes,
        seed=replayer.seed,
        kind="simulated",
        counters=total,
        hit_rate=found.cached_hits / found.cached_lookups if found.cached_lookups else None,
        pick_hit_rate=total.pick_hits / total.picks if total.picks else None,
        mib_per_token=None
        if per_token.bytes_moved is None
        else per_token.bytes_moved / MIB / produced,
        uploads_per_token=per_token.demand_uploads / produced,
        busy_lanes=access.schedule.busy_lanes,
        cycle={"min": low, "median": median, "max": high},
        cliff_slots=cliff,
        cliff_share=cliff / largest_slots,
        peak_bytes=peak_bytes,
        by_class=found.by_class,
        by_phase=found.by_phase,
        by_layer=found.by_layer,
        by_request=found.by_request,
        windows=found.windows,
        notes=tuple(dict.fromkeys(notes)),
        provenance=provenance(meta, replayer.command, started),
    )


def room_of(replayer: Replayer, cell: Cell) -> tuple[tuple[int, ...], float, int | None]:
    """Slots of each group, their share of all experts, and their bytes (None when unknown)."""
    layout = replayer.layout
    if replayer.semantics == "bmoe":
        assert replayer.layer_bytes is not None
        budget = cell.budget_bytes or 0
        total = sum(replayer.layer_bytes) * replayer.trace.meta.n_expert
        return (replayer.slots(cell, 0),), budget / total, cell.budget_bytes
    capacity_bytes = None
    if replayer.layer_bytes is not None:
        sizes = [group.expert_bytes for group in layout.groups]
        capacity_bytes = sum(n * (b or 0) for n, b in zip(cell.slots, sizes, strict=True))
    return tuple(cell.slots), sum(cell.slots) / layout.n_keys, capacity_bytes


def _schedule(replayer: Replayer, n_steps: int) -> str:
    """The schedule, and which of its steps if not all."""
    if replayer.steps is None:
        return replayer.schedule
    if not replayer.skipped:
        return f"{replayer.schedule}, first {n_steps} steps"
    return f"{replayer.schedule}, {n_steps} steps from step {replayer.skipped} on"
