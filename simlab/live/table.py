"""Measured figures as plain text: profiles of a link, and cells beside their simulation."""

from __future__ import annotations

from collections.abc import Sequence

from simlab.cost.link import LinkProfile
from simlab.live.cells import LiveCell
from simlab.result.schema import Result


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text as lines with columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def profile_lines(profile: LinkProfile) -> list[str]:
    """A link profile: a line a size, then what is made of it."""
    where = f" ({profile.note})" if profile.note else ""
    lines = [f"MEASURED on {profile.name}{where}", "GB/s by copy size, medians", ""]
    cases = sorted(
        {(p["memory"], p["copies"] > 1, p["compute"]) for p in profile.points},
        key=lambda case: (case[0] != "pinned", not case[1], case[2]),
    )
    found = {(p["size"], p["memory"], p["copies"] > 1, p["compute"]): p for p in profile.points}
    names = [
        f"{memory}, {'many' if many else 'one'}{', compute' if busy else ''}"
        for memory, many, busy in cases
    ]
    rows = [["copy size", *names]]
    for size in sorted({p["size"] for p in profile.points}):
        rates = [
            f"{found[size, *case]['gb_s']:.2f}" if (size, *case) in found else "-" for case in cases
        ]
        rows.append([_size(size), *rates])
    limit = "unknown" if profile.limit_gb_s is None else f"{profile.limit_gb_s:.1f} GB/s"
    lines += aligned(rows)
    lines += [
        "",
        f"peak {profile.peak_gb_s:.2f} GB/s; fitted: {profile.bandwidth_gb_s:.2f} GB/s and"
        f" {profile.latency_us:.1f} us a copy",
        f"router ids to the host, and the wait for them: {profile.ids_wait_us:.1f} us",
        f"the link's limit: {limit} ({profile.limit_source})",
        "all bytes arrived as sent" if profile.valid else f"INVALID: {'; '.join(profile.problems)}",
    ]
    return lines


def cells_lines(cells: Sequence[LiveCell], link: LinkProfile) -> list[str]:
    """Cells, measured beside simulated and predicted."""
    first = cells[0].measured
    timing = first.timing
    where = f" ({timing['device_note']})" if timing["device_note"] else ""
    lines = [f"{first.trace_name}  (model: {first.model})"]
    if first.synthetic:
        lines.append("SYNTHETIC trace: no figure here speaks for a real model")
    lines += [
        f"MEASURED on {timing['device']}{where}, beside SIMULATED and PREDICTED",
        f"{first.semantics} semantics, schedule: {first.schedule}, prefill: {first.prefill},"
        f" on decline: {first.on_decline}, compute: {timing['compute']}",
        f"uploads predicted from {link.bandwidth_gb_s:.2f} GB/s and {link.latency_us:.1f} us a"
        f" copy; peak of the link {link.peak_gb_s:.2f} GB/s",
        "",
    ]
    rows = [
        ["policy", "C", "slots", "hit rate", "misses", "MiB/token", "= simulated", "ms/token",
         "(range)", "predicted", "error", "tokens/s", "upload GB/s", "of peak", "plan us/layer"]
    ]  # fmt: skip
    rows += [_row(cell) for cell in cells]
    lines += aligned(rows)
    for level, found in sorted(_baselines(cells).items()):
        each = ", ".join(f"{name} {ms:.3f}" for name, ms in found.items())
        lines.append(f"baselines at C = {level}, ms/token measured: {each}")
    sources = dict.fromkeys(cell.predicted.timing["costs"]["source"] for cell in cells)
    lines += [f"predicted from: {source}" for source in sources]
    notes = dict.fromkeys(note for cell in cells for note in cell.measured.notes)
    lines += [note for note in notes if note != timing["device_note"]]
    for cell in cells:
        lines += [f"DIFFERENT, {name(cell.measured)}: {what}" for what in cell.differences]
    return lines


def name(row: Result) -> str:
    """A cell in a sentence."""
    return f"{row.policy} at {_slots(row)} slots, C = {row.concurrency}"


def _row(cell: LiveCell) -> list[str]:
    row, timing = cell.measured, cell.measured.timing
    rate = "-" if row.hit_rate is None else f"{100 * row.hit_rate:.2f} %"
    error = "calibration" if timing["calibrated_on_this"] else f"{100 * timing['error']:+.1f} %"
    return [
        row.policy + (" *" if row.needs_engine_change else ""),
        str(row.concurrency),
        _slots(row),
        rate,
        f"{row.counters.misses:,}",
        "-" if row.mib_per_token is None else f"{row.mib_per_token:.2f}",
        "yes" if not cell.differences else "NO",
        f"{timing['ms_per_token']:.3f}",
        f"{timing['step_ms']['p10']:.3f}-{timing['step_ms']['p90']:.3f}",
        f"{timing['predicted_ms_per_token']:.3f}",
        error,
        "-" if timing["tokens_per_s"] is None else f"{timing['tokens_per_s']:,.1f}",
        "-" if timing["upload_gb_s"] is None else f"{timing['upload_gb_s']:.2f}",
        "-" if not timing["upload_efficiency"] else f"{100 * timing['upload_efficiency']:.0f} %",
        f"{timing['plan_us_per_layer']:.1f}",
    ]


def _baselines(cells: Sequence[LiveCell]) -> dict[int, dict[str, float]]:
    return {
        cell.measured.concurrency: cell.measured.timing["baselines_ms_per_token"]
        for cell in cells
        if cell.measured.timing["baselines_ms_per_token"]
    }


def _slots(row: Result) -> str:
    return "+".join(f"{n:,}" for n in row.slots)


def _size(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 1024} KiB"
