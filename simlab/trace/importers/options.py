"""What a user says about a file to import, and the steps that all importers share."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass

import numpy as np

from simlab import __version__
from simlab.errors import TraceError, UsageError
from simlab.trace.arrow import Rows, offsets_of, sort_rows, take_rows, trace_of
from simlab.trace.schema import DECODE, PREFILL, Trace, TraceMeta
from simlab.trace.stats import token_starts, tokens_repeat
from simlab.trace.validate import layers_seen

#: Choices of ``--phase``: one phase for all rows, or what the file says (decode if it does not).
PHASES = {"prefill": PREFILL, "decode": DECODE, "column": None}


@dataclass(frozen=True)
class ImportOptions:
    """Facts about the file that take precedence over what it says itself.

    Attributes:
        n_expert: experts of a layer. k: most picks of a row (the most seen if not said).
        expert_bytes: see parse_expert_bytes.
        phase: a key of PHASES.
        drop_dummies: leave out tokens that no text made (see drop_dummies).
        source, command: provenance.
    """

    n_expert: int | None = None
    k: int | None = None
    model: str | None = None
    expert_bytes: str | None = None
    phase: str = "column"
    source: str | None = None
    command: str = ""
    drop_dummies: bool = False


def parse_expert_bytes(spec: str, moe_layers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Bytes of one expert per layer and tensor.

    Args:
        spec: ``N`` for all layers, or ``0-23:N,24-47:M`` by layer number; for N either the sum or
            one number a tensor: ``884736+884736+884736``.

    Raises:
        UsageError: the text is not of that form, or does not cover every layer exactly once.
    """
    found: dict[int, tuple[int, ...]] = {}
    for part in spec.split(","):
        match = re.fullmatch(
            r"(?:(\d{1,5})(?:-(\d{1,5}))?:)?(\d{1,15}(?:\+\d{1,15}){0,3})", part.strip()
        )
        if match is None:
            raise UsageError(
                f"--expert-bytes {spec!r}: write N, or 0-23:N,24-47:M by layer, with N a number of"
                " bytes or one number a tensor (A+B+C)"
            )
        first, last, numbers = match.groups()
        sizes = tuple(int(n) for n in numbers.split("+"))
        if min(sizes) <= 0:
            raise UsageError(f"--expert-bytes {spec!r}: bytes must be positive")
        if first is None:
            layers = list(moe_layers)
        else:
            layers = [n for n in moe_layers if int(first) <= n <= int(last or first)]
        for layer in layers:
            if layer in found:
                raise UsageError(f"--expert-bytes {spec!r} names layer {layer} twice")
            found[layer] = sizes
    missing = [layer for layer in moe_layers if layer not in found]
    if missing:
        raise UsageError(f"--expert-bytes {spec!r} does not cover layer {missing[0]} of the trace")
    return tuple(found[layer] for layer in moe_layers)


def finish(rows: Rows, meta: TraceMeta | None, options: ImportOptions, source: str) -> Trace:
    """Rows of a source as a sorted Trace with its metadata.

    Args:
        rows: in any order.
        meta: what the file itself says, None if nothing; ``options`` take precedence.
        source: name of the file, unless the options name the source.
    """
    n_expert = options.n_expert
    if n_expert is None and meta:
        n_expert = meta.n_expert
    if n_expert is None:
        raise UsageError("say how many experts a layer has: --n-expert N")
    if not len(rows.request):
        raise TraceError("the file is empty: it holds no row")
    if PHASES[options.phase] is not None:
        rows = rows._replace(phase=np.full_like(rows.phase, PHASES[options.phase]))
    notes = meta.notes if meta else ()
    rows = sort_rows(rows)
    if options.drop_dummies:
        before = len(rows.request)
        rows, tokens = drop_dummies(rows, n_expert)
        if tokens:
            notes += (f"import left out {tokens} dummy tokens ({before - len(rows.request)} rows)",)
        if not len(rows.request):
            raise TraceError("every token is a dummy: nothing is left")
    layers = layers_seen(rows.layer)
    sizes = meta.expert_bytes if meta and meta.moe_layers == layers else ()
    if options.expert_bytes is not None:
        sizes = parse_expert_bytes(options.expert_bytes, layers)
    k = options.k
    if k is None:
        k = meta.k if meta else max(1, int(rows.lengths.max()))
    if not 1 <= n_expert <= 65536 or not 1 <= k <= n_expert:
        raise UsageError(f"n_expert = {n_expert} with k = {k} picks a row is not possible")
    versions = {"simlab": __version__, "numpy": np.__version__, "python": platform.python_version()}
    base = meta or TraceMeta(n_expert=n_expert, k=k, moe_layers=layers)
    return trace_of(
        rows,
        base.with_(
            n_expert=n_expert,
            k=k,
            moe_layers=layers,
            model=options.model or base.model,
            expert_bytes=sizes,
            source=options.source or base.source or source,
            command=options.command,
            notes=notes,
            versions={**base.versions, **versions},
            content_hash="",
        ),
    )


#: So many equal tokens in a row (picks of all layers) are taken for a warm-up batch.
DUMMY_RUN = 64


def drop_dummies(rows: Rows, n_expert: int) -> tuple[Rows, int]:
    """Sorted rows without the tokens that no text made, and how many those were.

    A token is a dummy when a row of it holds only zeros (padding; k > 1), or all experts of the
    layer while most rows hold fewer, or when it is one of DUMMY_RUN or more successive tokens of a
    request with equal picks in all layers (warm-up batches).
    """
    starts = token_starts(rows.request, rows.token)
    lengths = rows.lengths.astype(np.int64)
    filled = np.flatnonzero(lengths)
    highest = np.ones(len(lengths), dtype=np.int64)
    if len(filled):
        begin = (np.cumsum(lengths) - lengths)[filled]
        highest[filled] = np.maximum.reduceat(rows.experts, begin)
    bad_rows = (lengths > 1) & (highest == 0)
    if np.median(lengths) < n_expert:
        bad_rows |= lengths == n_expert
    bad = np.logical_or.reduceat(bad_rows, starts)
    repeat = tokens_repeat(rows.request, rows.layer, offsets_of(rows.lengths), rows.experts, starts)
    # runs: a token that does not repeat its predecessor begins one
    run = np.cumsum(~repeat) - 1
    bad |= (np.bincount(run) >= DUMMY_RUN)[run]
    sizes = np.diff(np.append(starts, len(lengths)))
    keep = np.flatnonzero(~np.repeat(bad, sizes))
    return (take_rows(rows, keep) if bad.any() else rows), int(bad.sum())
