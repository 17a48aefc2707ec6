"""Parts of traces and several traces put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.errors import UsageError
from simlab.trace.arrow import Rows, join_rows, take_rows, trace_of
from simlab.trace.schema import Trace, TraceMeta

#: Numbers to keep: a range, or numbers and ranges.
Numbers = range | Iterable[int | range]


def slice_trace(
    trace: Trace,
    *,
    requests: Numbers | None = None,
    tokens: Numbers | None = None,
    layers: Numbers | None = None,
    phase: int | None = None,
) -> Trace:
    """The rows that meet all conditions, under their numbers.

    Args:
        requests, tokens, layers: what to keep; None keeps all.
        phase: PREFILL or DECODE to keep only that.

    Raises:
        UsageError: no row is left, or a layer is not one of the trace.
    """
    rows = _rows(trace)
    meta = trace.meta
    keep = np.ones(trace.n_rows, dtype=np.bool_)
    said = []
    for name, wanted in (("request", requests), ("token", tokens), ("layer", layers)):
        if wanted is not None:
            spans = _spans(wanted)
            said.append(f"{name}s {_show(spans)}")
            keep &= _within(getattr(rows, name), spans)
    kept_layers = meta.moe_layers
    if layers is not None:
        spans = _spans(layers)
        kept_layers = tuple(n for n in meta.moe_layers if _within(np.array([n]), spans)[0])
        absent = [s[0] for s in spans if len(s) == 1 and s[0] not in meta.moe_layers]
        if absent or not kept_layers:
            known = _show([range(n, n + 1) for n in meta.moe_layers])
            which = f"layer {absent[0]} is not a" if absent else "none of the layers is a"
            raise UsageError(f"{which} MoE layer of the trace ({known})")
    if phase is not None:
        said.append(("prefill", "decode")[phase] + " only")
        keep &= rows.phase == phase
    part = take_rows(rows, np.flatnonzero(keep))
    if not len(part.experts):
        raise UsageError(f"no pick of the trace meets: {', '.join(said)}")
    present = {str(number) for number in np.unique(part.request)}
    sizes = dict(zip(meta.moe_layers, meta.expert_bytes, strict=False))
    note = f"slice of {meta.content_hash[:16] or 'a trace'}: {', '.join(said) or 'everything'}"
    return trace_of(
        part,
        meta.with_(
            moe_layers=kept_layers,
            expert_bytes=tuple(sizes[n] for n in kept_layers) if sizes else (),
            tags={key: tag for key, tag in meta.tags.items() if key in present},
            notes=(*meta.notes, note),
            content_hash="",
        ),
    )


def _spans(wanted: Numbers) -> list[range]:
    """Ascending ranges of step 1."""
    items = [wanted] if isinstance(wanted, range) else wanted
    spans: list[range] = []
    numbers: list[int] = []
    for item in items:
        if not isinstance(item, range):
            numbers.append(int(item))
        elif item.step == 1:
            spans.append(item)
        else:
            numbers.extend(item)
    return sorted(spans + [range(n, n + 1) for n in set(numbers)], key=lambda span: span.start)


def _within(column: npt.NDArray[Any], spans: list[range]) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(column), dtype=np.bool_)
    single = [span.start for span in spans if len(span) == 1]
    if single:
        found |= np.isin(column, single)
    for span in spans:
        if len(span) > 1:
            found |= (column >= span.start) & (column < span.stop)
    return found


def _show(spans: list[range]) -> str:
    """Ranges as ``0-3,7``, neighbours joined; long lists are cut."""
    joined: list[range] = []
    for span in spans:
        if joined and span.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, span.stop))
        elif len(span):
            joined.append(span)
    texts = [str(s.start) if len(s) == 1 else f"{s.start}-{s.stop - 1}" for s in joined[:8]]
    return ",".join(texts + ["..."] * (len(joined) > 8)) or "none"


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """Traces of one model one after the other; requests are numbered anew from 0.

    Optional columns stay if every trace has them. Recorded steps are numbered on.

    Raises:
        UsageError: there is none, or they differ in model, shape or expert bytes.
    """
    if not traces:
        raise UsageError("there is nothing to merge: name at least one trace")
    first = traces[0].meta
    for number, trace in enumerate(traces[1:], 2):
        for name in ("model", "n_expert", "k", "moe_layers", "expert_bytes"):
            mine, theirs = getattr(first, name), getattr(trace.meta, name)
            if mine != theirs:
                raise UsageError(
                    f"trace 1 and trace {number} differ in {name} ({_short(mine)} and"
                    f" {_short(theirs)}): only traces of one model can be merged"
                )
    weights = all(trace.weights is not None for trace in traces)
    step = all(trace.step is not None for trace in traces)
    pieces, tags = [], {}
    base = next_step = 0
    for trace in traces:
        rows = _rows(trace)
        old, ranks = np.unique(rows.request, return_inverse=True)
        tags.update(
            {
                str(base + i): trace.meta.tags[str(request)]
                for i, request in enumerate(old)
                if str(request) in trace.meta.tags
            }
        )
        rows = rows._replace(
            request=(ranks + base).astype(np.int32),
            weights=rows.weights if weights else None,
            step=rows.step + np.int32(next_step) if step and rows.step is not None else None,
        )
        pieces.append(rows)
        base += len(old)
        if rows.step is not None:
            next_step = int(rows.step.max()) + 1
    return trace_of(join_rows(pieces), _merged_meta([trace.meta for trace in traces], tags))


def _merged_meta(metas: Sequence[TraceMeta], tags: dict[str, str]) -> TraceMeta:
    """Common provenance; what differs is joined. One synthetic part makes the whole synthetic."""
    kinds = {meta.kind for meta in metas}
    kind = "synthetic" if "synthetic" in kinds else "imported" if len(kinds) > 1 else kinds.pop()
    hashes = ", ".join(meta.content_hash[:16] or "unsaved" for meta in metas)
    old_notes = dict.fromkeys(note for meta in metas for note in meta.notes)
    return metas[0].with_(
        kind=kind,
        source="; ".join(dict.fromkeys(meta.source for meta in metas if meta.source)),
        device="; ".join(dict.fromkeys(meta.device for meta in metas if meta.device)),
        command="",
        seed=metas[0].seed if len(metas) == 1 else None,
        tags=tags,
        notes=(*old_notes, f"merged of {len(metas)} traces: {hashes}"),
        partial=any(meta.partial for meta in metas),
        content_hash="",
    )


def _rows(trace: Trace) -> Rows:
    return Rows(
        trace.request,
        trace.token,
        trace.phase,
        trace.layer,
        np.diff(trace.offsets).astype(np.uint16),
        trace.experts,
        trace.weights,
        trace.step,
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
