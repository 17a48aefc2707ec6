"""The result schema: one row a cell (trace x policy x size x concurrency x semantics).

Replay writes these rows, and sweep, live and report speak them; nothing else is exchanged between
those parts. Counters hold whole numbers; rates derive from them and are stored for convenience.

Conservation, asserted when a row is made:
``lookups = hits + demand_uploads + streamed + cpu_served``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from simlab.errors import SimlabError

SCHEMA_VERSION = 1

#: Simulated by the replayer, predicted by the time model, or measured on a device; never mixed.
KINDS = ("simulated", "predicted", "measured")

#: Classes of steps as llama.cpp prints them, plus what failed the gate.
CLASSES = ("<=8", "9-32", "large")


@dataclass(frozen=True)
class Counters:
    """Whole-number counters of a cell or of a part of it.

    ``lookups`` are distinct experts per (step, layer); ``picks`` count every token's picks.
    ``streamed`` and ``cpu_served`` are misses that filled no slot. ``bytes_moved`` is None when the
    trace does not know its expert bytes, ``merged_runs`` when nobody kept which slots were filled
    (``simlab curve`` in one pass).
    """

    steps: int = 0
    tokens: int = 0
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    demand_uploads: int = 0
    async_uploads: int = 0
    streamed: int = 0
    cpu_served: int = 0
    merged_runs: int | None = 0
    bytes_moved: int | None = 0
    picks: int = 0
    pick_hits: int = 0

    def check(self, what: str) -> None:
        """Raise SimlabError unless the counters conserve lookups (see the module's docstring)."""
        served = self.hits + self.demand_uploads + self.streamed + self.cpu_served
        if self.lookups != served or self.misses != self.lookups - self.hits:
            raise SimlabError(f"internal error: counters of {what} do not add up: {self}")

    @property
    def hit_rate(self) -> float | None:
        """hits / lookups, None without lookups."""
        return self.hits / self.lookups if self.lookups else None


@dataclass(frozen=True)
class Result:
    """One cell. The first fields identify it, then counters, rates, parts and provenance.

    Attributes:
        slots: slots of each group, in group order, after clipping to the group's keys.
        capacity_bytes: the bytes of those slots (``bmoe``: the budget), None when unknown.
        n_keys: (layer, expert) pairs of all groups; ``slots_share`` = sum(slots) / n_keys.
        counters: everything, cached path and large path together.
        hit_rate: hits / lookups over the cached path only (steps that passed the gate), None when
            no step took it.
        mib_per_token: MiB moved in decode steps per decode token (over all tokens when the run has
            no decode token); None when expert bytes are unknown.
        uploads_per_token: demand uploads likewise.
        by_class: CLASSES -> Counters. by_phase: "prefill", "decode" -> Counters.
        by_layer: list of {"layer": n, **Counters}. by_request: list of {"request", "picks",
            "pick_hits"}. windows: list of {"first_step", "last_step", **Counters}, equal spans of
            steps.
        cycle: {"min", "median", "max"} of the cycle T over decode steps, in the group with the most
            layers: slots are per group, so it compares with each entry of ``slots``.
        cliff_slots: (layers - 1) x k of that group at C = 1, its median T otherwise: LRU is near
            zero below. cliff_share: the same as a share of that group's keys.
        busy_lanes: mean number of streams that decoded together.
        peak_bytes: ``bmoe`` only, the most bytes resident at once.
        bound: the policy is a bound (opt, opt-bypass), not something an engine runs.
        needs_engine_change: the policy declines misses, which llama.cpp cannot do.
        ubatch: most tokens of a prefill step.
        ms_per_token: mean milliseconds per decode token: ``predicted`` by the time model or
            ``measured`` on a device, None in simulated rows. timing: what it is made of, and where
            it comes from (``simlab/live`` and ``simlab/cost`` say which entries they write).
        synthetic: the trace is synthetic; printed wherever the figures are.
    """

    trace_hash: str
    layout_hash: str
    trace_name: str
    model: str
    synthetic: bool
    policy: str
    policy_version: int
    policy_hash: str
    params: Mapping[str, float]
    bound: bool
    needs_engine_change: bool
    semantics: str
    pool: str
    on_decline: str
    prefill: str
    schedule: str
    concurrency: int
    slots: tuple[int, ...]
    n_keys: int
    slots_share: float
    capacity_bytes: int | None
    seed: int
    kind: str
    counters: Counters
    hit_rate: float | None
    pick_hit_rate: float | None
    mib_per_token: float | None
    uploads_per_token: float | None
    busy_lanes: float
    cycle: Mapping[str, int]
    cliff_slots: int
    cliff_share: float
    peak_bytes: int | None
    by_class: Mapping[str, Counters]
    by_phase: Mapping[str, Counters]
    by_layer: list[dict[str, Any]] = field(default_factory=list)
    by_request: list[dict[str, Any]] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    ubatch: int = 512
    ms_per_token: float | None = None
    timing: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """A flat, JSON-ready row: counters at the top level, parts nested."""
        row: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "counters":
                row.update(asdict(value))
            elif f.name in ("by_class", "by_phase"):
                row[f.name] = {name: asdict(part) for name, part in value.items()}
            elif f.name == "params":
                row["params_json"] = dict(value)
            elif f.name == "slots":
                row["slots_json"] = list(value)
            elif isinstance(value, tuple):
                row[f.name] = list(value)
            else:
                row[f.name] = value
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Result:
        """The inverse of to_dict; unknown keys are ignored.

        Raises:
            SimlabError: the row lacks a field, is of a newer schema, or does not conserve lookups.
        """
        if not isinstance(row, Mapping):
            raise SimlabError("a result row is not an object")
        if int(row.get("schema_version", 0)) > SCHEMA_VERSION:
            raise SimlabError("the results are of a newer schema; update simlab")
        try:
            known: dict[str, Any] = {f.name: row[f.name] for f in fields(cls) if f.name in row}
            known["params"] = dict(row["params_json"])
            known["slots"] = tuple(int(s) for s in row["slots_json"])
            known["notes"] = tuple(row.get("notes", ()))
            known["counters"] = Counters(**{f.name: row[f.name] for f in fields(Counters)})
            for name in ("by_class", "by_phase"):
                known[name] = {part: Counters(**c) for part, c in row[name].items()}
            result = cls(**known)
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise SimlabError(f"not a simlab result row ({exc!r})") from None
        if result.kind not in KINDS:
            raise SimlabError(f"kind must be one of {', '.join(KINDS)}, not {result.kind!r}")
        result.counters.check(f"{result.policy} at {list(result.slots)} slots")
        return result
