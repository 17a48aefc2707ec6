"""A llama.cpp log beside what simlab computes for the same model: slots, hits, bytes.

Slots follow from the model and the budget alone, so a difference is an error of one side. Hit rates
are those of a text: they agree only as far as the trace is that of the logged run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from simlab.analysis.llamacpp_log import EngineLog, LoggedDevice
from simlab.model.budget import MIB, NothingCached, bank_bytes, host_bytes, slots_for_budget
from simlab.model.layout import ExpertLayout
from simlab.result.schema import Counters

#: What a backend may add to a pool: CUDA pads the last row of a bank to 512 values.
_PADDING_MIB = 0.05


@dataclass(frozen=True)
class Line:
    """One figure: logged and predicted as printed; ``same``: None where they need not agree."""

    what: str
    logged: str
    predicted: str
    same: bool | None
    reason: str = ""


@dataclass(frozen=True)
class Check:
    """The comparison. ``budgets``: the whole --moe-cache-mib that give the logged slots, if any."""

    lines: tuple[Line, ...]
    budgets: tuple[int, int] | None
    mib: int | None

    @property
    def slots_agree(self) -> bool:
        """Whether no line about slots or bytes of the pools differs."""
        return all(line.same is not False for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "slots_agree": self.slots_agree}


def logged_slots(log: EngineLog, layout: ExpertLayout) -> list[int] | None:
    """Logged slots in the layout's order of groups; None if the log has other groups.

    llama.cpp prints its groups device by device, in the order of their first layers.
    """
    printed = [group for device in log.devices for group in device.groups]
    order = _printed_order(layout)
    if len(printed) != len(order):
        return None
    slots = [0] * len(order)
    for group, i in zip(printed, order, strict=True):
        if group.layers != len(layout.groups[i].layers):
            return None
        slots[i] = group.slots
    return slots


def _printed_order(layout: ExpertLayout) -> list[int]:
    return sorted(range(len(layout.groups)), key=lambda i: (layout.groups[i].device, i))


def check_slots(
    log: EngineLog, layout: ExpertLayout, *, mib: int | None, split: Sequence[float]
) -> Check:
    """Compare the startup lines.

    Args:
        mib: the budget of the logged run; None: the log's own command line, or any that explains
            the slots.
        split: share of each device.
    """
    mib = log.mib if mib is None else mib
    if log.refused or log.disabled:
        return Check((_refusal(log, layout, mib, split),), None, mib)
    lines = [_groups_line(log, layout)]
    slots = logged_slots(log, layout)
    host = host_bytes(layout)
    for device in log.devices:
        own = _groups_of(device, log, layout)
        told = sum(host[i] for i in own) / MIB
        lines.append(
            _mib(
                f"{device.name}: host experts",
                device.host_mib,
                told,
                "other layers are in host memory (--n-cpu-moe, --host-layers), the split is another"
                " one (--tensor-split), or the file is quantised otherwise",
            )
        )
    budgets = None
    if slots is not None:
        budgets = _budgets_for(slots, layout, split)
        predicted = None if mib is None else _predict(layout, mib, split)
        for i in _printed_order(layout):
            keys = layout.keys_of(i)
            if predicted is None:
                lines.append(_inferred(i, slots, keys, layout, budgets))
            else:
                lines.append(_slots_line(i, slots, predicted, keys, layout, budgets))
        for device in log.devices:
            own = _groups_of(device, log, layout)
            bank = sum(bank_bytes(layout.groups[i].tensor_bytes, slots[i]) for i in own)
            lines.append(
                _mib(
                    f"{device.name}: cache size",
                    device.cache_mib,
                    bank / MIB,
                    "experts of other bytes, or a device that aligns otherwise",
                    _PADDING_MIB,
                )
            )
    return Check(tuple(lines), budgets, mib)


def _refusal(log: EngineLog, layout: ExpertLayout, mib: int | None, split: Sequence[float]) -> Line:
    if log.disabled:
        return Line(
            "cache", "disabled", f"{len(layout.layers)} layers cached", False,
            "all experts are on the device: -cmoe or --n-cpu-moe was not given",
        )  # fmt: skip
    predicted = None if mib is None else _predict(layout, mib, split)
    if mib is None:
        return Line("cache", "refused to start", "budget unknown", None, "give --moe-cache-mib")
    if predicted is None or not any(predicted):
        return Line("cache", "refused to start", f"{mib} MiB caches no group", True)
    return Line(
        "cache", "refused to start", f"slots {predicted}", False, "a larger budget than the log's"
    )


def _groups_line(log: EngineLog, layout: ExpertLayout) -> Line:
    printed = [f"{g.layers} {g.type_name.upper()}" for d in log.devices for g in d.groups]
    wanted = [
        f"{len(layout.groups[i].layers)}"
        f" {layout.groups[i].types[-1] if layout.groups[i].types else '?'}"
        for i in _printed_order(layout)
    ]
    reason = ""
    if printed != wanted:
        logged = sum(g.layers for d in log.devices for g in d.groups)
        if logged != len(layout.layers):
            reason = (
                f"{logged} layers had their experts in host memory, not {len(layout.layers)}: name"
                " them with --n-cpu-moe or --host-layers"
            )
        else:
            reason = "the log is of another quantisation of the model, or of another split"
    return Line(
        "groups (layers, type of down)", "; ".join(printed), "; ".join(wanted), printed == wanted,
        reason,
    )  # fmt: skip


def _groups_of(device: LoggedDevice, log: EngineLog, layout: ExpertLayout) -> list[int]:
    """Groups of the layout on a logged device: devices in the order in which they are printed."""
    used = sorted({group.device for group in layout.groups})
    place = log.devices.index(device)
    if place >= len(used):
        return []
    return [i for i, group in enumerate(layout.groups) if group.device == used[place]]


def _predict(layout: ExpertLayout, mib: int, split: Sequence[float]) -> list[int] | None:
    try:
        return slots_for_budget(layout, mib, split)[0]
    except NothingCached:
        return None


def _budgets_for(
    slots: Sequence[int], layout: ExpertLayout, split: Sequence[float]
) -> tuple[int, int] | None:
    """The first and last whole budget that give exactly these slots."""

    def first(reached: int) -> int:
        """Smallest budget whose sum of slots is ``reached`` or more."""
        low, high = 1, sum(host_bytes(layout)) * 2 // MIB + 64 * len(layout.groups)
        while low < high:
            middle = (low + high) // 2
            if sum(_predict(layout, middle, split) or [0]) >= reached:
                high = middle
            else:
                low = middle + 1
        return low

    low, high = first(sum(slots)), first(sum(slots) + 1) - 1
    if _predict(layout, low, split) != list(slots):
        return None
    return low, max(low, high)


def _span(budgets: tuple[int, int] | None) -> str:
    if budgets is None:
        return "no whole --moe-cache-mib gives these slots for this model and split"
    low, high = budgets
    return f"--moe-cache-mib {low}" + (f" to {high}" if high > low else "")


def _inferred(
    i: int,
    slots: Sequence[int],
    keys: int,
    layout: ExpertLayout,
    budgets: tuple[int, int] | None,
) -> Line:
    return Line(
        f"group {i + 1}: slots",
        f"{slots[i]} ({100 * slots[i] / keys:.1f}%)",
        f"those of {_span(budgets)}" if budgets else "none",
        budgets is not None,
        "" if budgets else _span(None),
    )


def _slots_line(
    i: int,
    slots: Sequence[int],
    predicted: Sequence[int],
    keys: int,
    layout: ExpertLayout,
    budgets: tuple[int, int] | None,
) -> Line:
    same = slots[i] == predicted[i]
    return Line(
        f"group {i + 1}: slots",
        f"{slots[i]} ({100 * slots[i] / keys:.1f}%)",
        f"{predicted[i]} ({100 * predicted[i] / keys:.1f}%)",
        same,
        ""
        if same
        else f"the log's slots are those of {_span(budgets)}"
        if budgets
        else _span(None),
    )


def _mib(what: str, logged: float, predicted: float, reason: str, room: float = 0.006) -> Line:
    same = abs(logged - predicted) <= room
    return Line(what, f"{logged:.2f} MiB", f"{predicted:.2f} MiB", same, "" if same else reason)


def check_counters(
    log: EngineLog, classes: dict[str, Counters], copied: tuple[int, float]
) -> tuple[Line, ...]:
    """Compare the exit lines with a replay; differences here are told, not judged.

    Args:
        classes: the replay's counters per class. copied: experts that large batches would copy on
            the device, counted per tensor as llama.cpp does, and their MiB.
    """
    lines = []
    for name in ("<=8", "9-32"):
        logged, told = log.classes.get(name), classes[name]
        if logged is None and not told.lookups:
            continue
        rate = told.hit_rate
        lines.append(
            Line(
                f"steps of {name} tokens: hit rate",
                "no such step" if logged is None else f"{logged.rate:.2f}%",
                "no such step" if rate is None else f"{100 * rate:.2f}%",
                None,
                _reason(log, name, classes),
            )
        )
        if logged is not None:
            lookups = logged.hits + logged.misses
            lines.append(
                Line(f"steps of {name} tokens: lookups", f"{lookups}", f"{told.lookups}", None)
            )
            moved = told.bytes_moved
            lines.append(
                Line(
                    f"steps of {name} tokens: uploaded",
                    f"{logged.mib:.2f} MiB",
                    "unknown" if moved is None else f"{moved / MIB:.2f} MiB",
                    None,
                )
            )
    if log.copied or copied[0]:
        n, mib = log.copied or (0, 0.0)
        lines.append(
            Line(
                "large batches: experts copied",
                f"{n} ({mib:.2f} MiB)",
                f"{copied[0]} ({copied[1]:.2f} MiB)",
                None,
                "" if (n, f"{mib:.2f}") == (copied[0], f"{copied[1]:.2f}")
                else "other prompts, or another --ubatch-size; counted once for each tensor",
            )
        )  # fmt: skip
    return tuple(lines)


def _reason(log: EngineLog, name: str, classes: dict[str, Counters]) -> str:
    """Why a hit rate differs, as far as the counters tell."""
    logged, told = log.classes.get(name), classes[name]
    if logged is None or not told.lookups:
        return (
            "steps of this size occur on one side only: another number of streams (-np,"
            " --concurrency), or drafts that are verified together"
        )
    if (logged.hits, logged.misses) == (told.hits, told.misses):
        return ""
    lookups = logged.hits + logged.misses
    if lookups == told.lookups:
        return "as many lookups, other picks: another quantisation, or sampled other tokens"
    return "another number of lookups: the trace is of other texts, or of another number of tokens"
