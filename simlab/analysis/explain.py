"""Why a policy misses: cold, capacity or the policy's own choice, beside Belady's optimum.

``cold``: the key's first lookup on the cached path, and the pool did not begin with it.
``capacity``: no first lookup, and the optimum misses it too. ``policy``: the optimum hits it.
``large``: in a step that does not take the cached path, where nothing is filled. The optimum is one
run of the bound: another as good may miss other lookups, as many in sum.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.analysis.reuse import reuse_distances
from simlab.errors import SimlabError, UsageError
from simlab.policy.registry import load_policy
from simlab.replay.account import N_WINDOWS
from simlab.replay.by_request import shared_out
from simlab.replay.cell import Cell, Outcomes
from simlab.replay.grid import over_cells
from simlab.replay.kernel import DECLINED, HIT, LARGE_HIT, LARGE_STREAMED
from simlab.replay.row import result_row
from simlab.replay.run import Replayer
from simlab.result.schema import Result

#: What became of a lookup; the codes of ``causes``.
CAUSES = ("cold", "hit", "capacity", "policy", "large")
_COLD, _HIT, _CAPACITY, _POLICY, _LARGE = range(5)
BOUNDS = ("opt", "opt-bypass")
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
UNTAGGED = "(no tag)"


@dataclass(frozen=True)
class Reuse:
    """Reuse distances of the lookups on the cached path, in distinct keys of their pool.

    Attributes:
        first: lookups without an earlier use. within: distance below the pool's slots. beyond: the
            others. quantiles: of the distances, as QUANTILES. histogram: lookups and misses by
            distance, each {"below": power of two, "lookups", "misses"}.
        missed_within: misses whose distance is below the slots: there was room for them.
    """

    first: int
    within: int
    beyond: int
    missed_within: int
    quantiles: dict[str, int]
    histogram: list[dict[str, int]]


@dataclass(frozen=True)
class Declined:
    """What became of the misses that the policy declined: the key's next lookup.

    ``soon``: within as many distinct keys as the pool has slots; ``late``: farther away; ``never``.
    ``bound_hits``: those whose next lookup the bound hits: it would have kept the key.
    """

    total: int
    soon: int
    late: int
    never: int
    bound_hits: int


@dataclass(frozen=True)
class Explanation:
    """Misses of a cell by cause, in whole and in parts; sums are the row's.

    Attributes:
        row, bound: result rows of the policy and of the bound.
        total: cause -> lookups. lucky: hits that the bound's run misses: policy - lucky (and, for
            a pool that begins empty, nothing else) is what the bound saves.
        by_layer, by_expert, by_window, by_tag: parts, each with its name and lookups by cause;
            by_expert holds every key, most policy misses first; by_tag is shared out by request.
    """

    row: Result
    bound: Result
    total: dict[str, int]
    lucky: int
    reuse: Reuse
    declined: Declined | None
    by_layer: list[dict[str, Any]] = field(default_factory=list)
    by_expert: list[dict[str, Any]] = field(default_factory=list)
    by_window: list[dict[str, Any]] = field(default_factory=list)
    by_tag: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        row = self.row
        return {
            "policy": row.policy,
            "params": dict(row.params),
            "slots": list(row.slots),
            "capacity_bytes": row.capacity_bytes,
            "concurrency": row.concurrency,
            "hit_rate": row.hit_rate,
            "bound": self.bound.policy,
            "bound_hit_rate": self.bound.hit_rate,
            "lookups": row.counters.lookups,
            "misses": row.counters.misses,
            "bound_misses": self.bound.counters.misses,
            "causes": self.total,
            "hits_the_bound_misses": self.lucky,
            "cycle": dict(row.cycle),
            "cliff_slots": row.cliff_slots,
            "below_cliff": min(row.slots) <= row.cliff_slots,
            "reuse": asdict(self.reuse),
            "declined": None if self.declined is None else asdict(self.declined),
            "by_layer": self.by_layer,
            "by_expert": self.by_expert,
            "by_window": self.by_window,
            "by_tag": self.by_tag,
            "notes": list(row.notes),
        }


def explain(
    replayer: Replayer, cells: Sequence[Cell], *, bound: str = "opt", jobs: int = 1
) -> list[Explanation]:
    """Explain the misses of cells.

    Args:
        bound: one of BOUNDS; ``opt-bypass`` may decline too.

    Raises:
        UsageError: there is no such bound.
    """
    if bound not in BOUNDS:
        raise UsageError(f"--bound must be one of {', '.join(BOUNDS)}, not {bound!r}")
    best = load_policy(bound)
    both = [
        c
        for cell in cells
        for c in (cell, Cell(best, cell.slots, cell.budget_bytes, cell.concurrency))
    ]

    def work(cell: Cell, progress: Any) -> tuple[Outcomes, Result]:
        started = time.time()
        outcomes = replayer.outcomes(cell, progress)
        return outcomes, result_row(replayer, cell, outcomes, started)

    found = list(over_cells(work, replayer, both, jobs=jobs))
    return [
        _explained(replayer, cell, *found[2 * i], *found[2 * i + 1]) for i, cell in enumerate(cells)
    ]


def _explained(
    replayer: Replayer, cell: Cell, ours: Outcomes, row: Result, theirs: Outcomes, bound: Result
) -> Explanation:
    access, meta = ours.access, replayer.trace.meta
    sizes = np.diff(access.offsets)
    reuses = None
    slots_of = np.zeros(len(meta.moe_layers), np.int32)
    for number, members in enumerate(replayer.pools):
        index = np.full(len(meta.moe_layers), -1, np.int32)
        index[members] = np.arange(len(members))
        served = replayer.on_cached_path(access, replayer.slots_by_step(cell, number))
        reuses = reuse_distances(access, served, index, meta.n_expert, reuses)
        slots_of[members] = replayer.slots(cell, number)
    assert reuses is not None
    distance, previous = reuses
    within = (distance >= 0) & (distance < np.repeat(slots_of[access.set_layer], sizes))
    code = causes(ours.outcome, theirs.outcome, previous)
    total = {name: int((code == i).sum()) for i, name in enumerate(CAUSES)}
    if (total["hit"], sum(total.values())) != (row.counters.hits, row.counters.lookups):
        raise SimlabError("internal error: the causes of misses do not add up to the misses")
    layer = np.repeat(access.set_layer, sizes).astype(np.int32)
    by_key = _parts(layer * meta.n_expert + access.experts, code, replayer.trace.n_keys)
    n_steps = len(access.step_tokens)
    n_windows = min(N_WINDOWS, n_steps)
    window_of = np.arange(n_steps) * n_windows // n_steps
    window = np.repeat(window_of[access.set_step].astype(np.int32), sizes)
    first = np.searchsorted(window_of, np.arange(n_windows + 1)).tolist()
    hits = (ours.outcome == HIT) & (theirs.outcome != HIT)
    return Explanation(
        row=row,
        bound=bound,
        total=total,
        lucky=int(hits.sum()),
        reuse=_reuse(distance, within, ours.outcome <= DECLINED, code),
        declined=_declined(ours.outcome, code, within, previous),
        by_layer=[
            {"layer": meta.moe_layers[i], **_named(part)}
            for i, part in enumerate(_parts(layer, code, len(meta.moe_layers)))
        ],
        by_expert=[
            {
                "layer": meta.moe_layers[k // meta.n_expert],
                "expert": int(k % meta.n_expert),
                **_named(by_key[k]),
            }
            for k in np.lexsort((np.arange(len(by_key)), -by_key[:, _POLICY]))
        ],
        by_window=[
            {"first_step": first[w], "last_step": first[w + 1] - 1, **_named(part)}
            for w, part in enumerate(_parts(window, code, n_windows))
        ],
        by_tag=_tags(replayer, ours, code),
    )


def causes(
    ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8], previous: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint8]:
    """The cause of each lookup, as an index of CAUSES.

    Args:
        ours, theirs: uint8 [lookups], outcomes under the policy and under the bound.
        previous: int32 [lookups], position of the key's last use on the cached path, or -1.
    """
    code = np.where(theirs == HIT, _POLICY, _CAPACITY).astype(np.uint8)
    code[previous < 0] = _COLD
    code[ours == LARGE_STREAMED] = _LARGE
    code[(ours == HIT) | (ours == LARGE_HIT)] = _HIT
    return code


def _parts(
    where: npt.NDArray[np.int32], code: npt.NDArray[np.uint8], n: int
) -> npt.NDArray[np.int64]:
    """Lookups by part and cause: int64 [n, causes]."""
    return np.bincount(where * len(CAUSES) + code, minlength=n * len(CAUSES)).reshape(n, -1)


def _named(part: npt.NDArray[Any]) -> dict[str, Any]:
    return dict(zip(CAUSES, part.tolist(), strict=True))


def _tags(replayer: Replayer, ours: Outcomes, code: npt.NDArray[np.uint8]) -> list[dict[str, Any]]:
    """Parts by the tag of the request; none where no request has one."""
    tags = replayer.trace.meta.tags
    if not tags:
        return []
    runs = np.zeros(len(ours.runs), np.int64)
    shares = shared_out(replayer.trace, ours.access, code, runs).sum(axis=(1, 2))
    by_tag: dict[str, npt.NDArray[np.float64]] = {}
    for request, part in zip(ours.access.tokens.request_ids.tolist(), shares, strict=True):
        name = tags.get(str(request), UNTAGGED)
        by_tag[name] = by_tag.get(name, 0) + part[: len(CAUSES)]
    return [{"tag": name, **_named(by_tag[name])} for name in sorted(by_tag)]


def _reuse(
    distance: npt.NDArray[np.int32],
    within: npt.NDArray[np.bool_],
    cached: npt.NDArray[np.bool_],
    code: npt.NDArray[np.uint8],
) -> Reuse:
    """Count by distance; ``within``: bool [lookups], reuses from nearer than the pool's slots."""
    again = distance >= 0
    missed = code != _HIT
    lookups = np.bincount(distance[again])
    misses = np.bincount(distance[again & missed], minlength=len(lookups))
    total = int(lookups.sum())
    below = np.cumsum(lookups)
    bits = np.frexp(np.arange(len(lookups), dtype=np.float64))[1]  # b: 2^(b-1) <= d < 2^b
    return Reuse(
        first=int((cached & ~again).sum()),
        within=int(within.sum()),
        beyond=total - int(within.sum()),
        missed_within=int((missed & within).sum()),
        quantiles={
            f"{q:g}": int(np.searchsorted(below, int(q * (total - 1)), side="right"))
            for q in QUANTILES
        }
        if total
        else {},
        histogram=[
            {
                "below": 2**b,
                "lookups": int(lookups[bits == b].sum()),
                "misses": int(misses[bits == b].sum()),
            }
            for b in range(int(bits.max(initial=-1)) + 1)
        ],
    )


def _declined(
    outcome: npt.NDArray[np.uint8],
    code: npt.NDArray[np.uint8],
    within: npt.NDArray[np.bool_],
    previous: npt.NDArray[np.int32],
) -> Declined | None:
    declined = outcome == DECLINED
    if not declined.any():
        return None
    following = np.full(len(outcome), -1, np.int32)
    used = np.flatnonzero(previous >= 0)
    following[previous[used]] = used
    after = following[declined]
    reused = after[after >= 0]
    soon = int(within[reused].sum())
    return Declined(
        total=int(declined.sum()),
        soon=soon,
        late=len(reused) - soon,
        never=int((after < 0).sum()),
        bound_hits=int((code[reused] == _POLICY).sum()),
    )
