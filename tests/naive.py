"""The oracle: a slow, obvious twin of the schedule, the semantics and the counters.

Written from the specification, not from the kernels: dicts, lists and sets, one lookup at a time. A
trace is a list of rows (request, token, phase, layer, experts in router order), phase 0 prefill,
1 decode; a shape names the groups of layers and what an expert weighs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from naive_all import POLICIES
from naive_pools import BypassPool, BytePool, Served, SlotPool, WavePool

Row = tuple[int, int, int, int, list[int]]
Token = tuple[int, int]  # (request, token)

GATE_TOKENS = 32


class Step(NamedTuple):
    """Tokens computed together, in lane order."""

    tokens: list[Token]
    prefill: bool


@dataclass(frozen=True)
class Shape:
    """Groups of layers, experts per layer, picks per token; bytes of one expert per layer."""

    groups: list[list[int]]
    n_expert: int
    k: int
    expert_bytes: Mapping[int, int] | None = None

    @property
    def layers(self) -> list[int]:
        return sorted(layer for group in self.groups for layer in group)


# ---- schedule -----------------------------------------------------------------------------------


def schedule(
    rows: Sequence[Row],
    concurrency: int,
    prefill: str = "engine",
    ubatch: int = 512,
    draft: int = 0,
    accepted: Sequence[int] = (),
) -> list[Step]:
    """The steps that an engine with ``concurrency`` lanes makes of the trace's requests.

    A request of several turns has prompts between its answers; its lane computes each of them at
    once, at the start of a step, as it does the first. With drafts a lane verifies its next tokens
    too, and goes on behind those that were accepted.
    """
    rolls = iter(accepted)
    requests: dict[int, list[tuple[int, int]]] = {}
    for request, token, phase, _, _ in rows:
        tokens = requests.setdefault(request, [])
        if (token, phase) not in tokens[-1:] and (phase == 1 or prefill == "engine"):
            tokens.append((token, phase))
    waiting = list(requests.items())
    lanes: list[tuple[int, list[tuple[int, int]]] | None] = [None] * concurrency
    steps: list[Step] = []
    while True:
        for i in range(concurrency):
            while lanes[i] is not None or waiting:
                request, left = lanes[i] or waiting.pop(0)
                prompt = list(takewhile(lambda token: token[1] == 0, left))
                for first in range(0, len(prompt), ubatch):
                    part = prompt[first : first + ubatch]
                    steps.append(Step([(request, token) for token, _ in part], True))
                left = left[len(prompt) :]
                lanes[i] = (request, left) if left else None
                if left:
                    break
        busy = [lane for lane in lanes if lane is not None]
        if not busy:
            return steps
        verified: list[Token] = []
        for request, left in busy:
            coming = list(takewhile(lambda token: token[1] == 1, left))[: draft + 1]
            verified += [(request, token) for token, _ in coming]
            del left[: min(1 + next(rolls, 0), len(coming))]
        steps.append(Step(verified, False))
        lanes = [lane if lane and lane[1] else None for lane in lanes]


def recorded(
    rows: Sequence[Row], step_of_row: Sequence[int], prefill: str = "engine"
) -> list[Step]:
    """The steps that the trace itself recorded; one with any decode token is a decode step."""
    tokens: dict[int, set[Token]] = defaultdict(set)
    decode: set[int] = set()
    for (request, token, phase, _, _), step in zip(rows, step_of_row, strict=True):
        if phase == 1 or prefill == "engine":
            tokens[step].add((request, token))
        if phase == 1:
            decode.add(step)
    return [Step(sorted(tokens[s]), s not in decode) for s in sorted(tokens)]


# ---- access sets --------------------------------------------------------------------------------


class AccessSet(NamedTuple):
    """One layer of one step: distinct experts in the order of the semantics, and all picks."""

    step: int
    layer: int
    experts: list[int]
    picks: list[tuple[int, int]]  # (request, expert)
    weight: dict[int, float]  # expert -> router weights of its picks, summed


def first_seen(experts: Iterable[int]) -> list[int]:
    """Distinct members in the order of their first occurrence."""
    return list(dict.fromkeys(experts))


def last_seen(experts: Sequence[int]) -> list[int]:
    """Distinct members in the order of their last occurrence."""
    return first_seen(reversed(experts))[::-1]


def access_sets(
    rows: Sequence[Row],
    steps: Sequence[Step],
    layers: Sequence[int],
    semantics: str,
    weights: Sequence[Sequence[float]] | None = None,
) -> list[AccessSet]:
    """All access sets in replay order; ``per-pick`` makes one of every pick."""
    weight_of = {
        (row[0], row[1], row[3], expert): weight
        for row, of_row in zip(rows, weights or [[1.0] * len(row[4]) for row in rows], strict=True)
        for expert, weight in zip(row[4], of_row, strict=True)
    }
    picks_of = {(request, token, layer): experts for request, token, _, layer, experts in rows}
    sets: list[AccessSet] = []
    for index, step in enumerate(steps):
        for layer in layers:
            picks: list[tuple[int, int]] = []
            weight: dict[int, float] = defaultdict(float)
            each: list[float] = []
            for request, token in step.tokens:
                experts = picks_of.get((request, token, layer), [])
                if semantics == "per-pick":
                    experts = sorted(experts)
                picks += [(request, expert) for expert in experts]
                for expert in experts:
                    each.append(weight_of[request, token, layer, expert])
                    weight[expert] += each[-1]
            order = [expert for _, expert in picks]
            if semantics == "per-pick":
                sets += [
                    AccessSet(index, layer, [e], [(r, e)], {e: w})
                    for (r, e), w in zip(picks, each, strict=True)
                ]
            elif picks:
                distinct = last_seen(order) if semantics == "bmoe" else first_seen(order)
                sets.append(AccessSet(index, layer, distinct, picks, weight))
    return sets


# ---- replay -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What does not depend on policy and size: the steps and their access sets."""

    shape: Shape
    semantics: str
    steps: list[Step]
    sets: list[AccessSet]


def prepare(
    rows: Sequence[Row],
    shape: Shape,
    semantics: str = "llama.cpp",
    concurrency: int = 1,
    prefill: str = "engine",
    ubatch: int = 512,
    step_of_row: Sequence[int] | None = None,
    weights: Sequence[Sequence[float]] | None = None,
    draft: int = 0,
    accepted: Sequence[int] = (),
) -> Run:
    """Schedule a trace and gather its access sets; ``step_of_row`` asks for the recorded steps.

    ``weights`` are the router's, a list a row.
    """
    if step_of_row is not None:
        steps = recorded(rows, step_of_row, prefill)
    else:  # bmoe: the whole prompt is one step
        ubatch = len(rows) + 1 if semantics == "bmoe" else ubatch
        steps = schedule(rows, concurrency, prefill, ubatch, draft, accepted)
    if semantics == "per-pick":  # prompts one token at a time: literal trace order
        steps = [
            part
            for step in steps
            for part in ([Step([t], True) for t in step.tokens] if step.prefill else [step])
        ]
    sets = access_sets(rows, steps, shape.layers, semantics, weights)
    return Run(shape, semantics, steps, sets)


class Tally:
    """Counters of a replay, whole and by part, named as in simlab.result.schema."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.cached: Counter[str] = Counter()
        self.by_class: dict[str, Counter[str]] = defaultdict(Counter)
        self.by_phase: dict[str, Counter[str]] = defaultdict(Counter)
        self.by_layer: dict[int, Counter[str]] = defaultdict(Counter)
        self.by_request: dict[int, Counter[str]] = defaultdict(Counter)
        #: whether each lookup hit, by (step, layer, expert); not kept under per-pick
        self.flags: dict[tuple[int, int, int], bool] = {}
        self.peak_bytes = 0

    @property
    def hit_rate(self) -> float | None:
        """Over the cached path only."""
        lookups = self.cached["lookups"]
        return self.cached["hits"] / lookups if lookups else None


def on_cached_path(run: Run, slots: int, tokens: int) -> bool:
    """Whether a step of so many tokens is served by the pool or by the large path."""
    if run.semantics == "bmoe":
        return True
    if run.semantics in ("per-pick", "sglang"):
        return slots > 0
    fits = min(tokens * run.shape.k, run.shape.n_expert) <= slots
    return 1 <= tokens <= GATE_TOKENS and fits


def class_of(cached: bool, tokens: int) -> str:
    """Class of a step, as llama.cpp prints them."""
    if not cached or tokens > GATE_TOKENS:
        return "large"
    return "<=8" if tokens <= 8 else "9-32"


def replay(
    run: Run,
    policy: str,
    slots: Sequence[int] = (),
    *,
    capacity_bytes: int | None = None,
    on_decline: str = "stream",
    seed: int = 0,
    params: Mapping[str, float] | None = None,
    shares: Mapping[int, float] | None = None,
) -> Tally:
    """Replay a run; ``slots`` per group, or ``capacity_bytes`` for the one pool of ``bmoe``.

    ``sglang``: slots per layer, in the order of the layers. ``shares``: from a step on, a pool has
    that share of its slots.
    """
    shape, tally = run.shape, Tally()
    if run.semantics == "bmoe":
        assert capacity_bytes is not None and shape.expert_bytes is not None
        mean = sum(shape.expert_bytes.values()) / len(shape.layers)
        _replay_group(
            run, tally, policy, shape.layers, max(1, int(capacity_bytes // mean)), on_decline, seed,
            params, capacity_bytes,
        )  # fmt: skip
    else:
        groups = [[x] for x in shape.layers] if run.semantics == "sglang" else shape.groups
        for layers, wanted in zip(groups, slots, strict=True):
            n_slots = min(wanted, len(layers) * shape.n_expert)
            _replay_group(
                run, tally, policy, layers, n_slots, on_decline, seed, params, shares=shares
            )
    tally.total.update(steps=len(run.steps), tokens=sum(len(s.tokens) for s in run.steps))
    for counts in (tally.total, *tally.by_class.values(), *tally.by_layer.values()):
        served = counts["hits"] + counts["demand_uploads"]
        assert counts["lookups"] == served + counts["streamed"] + counts["cpu_served"]
        assert counts["misses"] == counts["lookups"] - counts["hits"]
    return tally


def _replay_group(
    run: Run,
    tally: Tally,
    policy_name: str,
    layers: Sequence[int],
    slots: int,
    on_decline: str,
    seed: int,
    params: Mapping[str, float] | None,
    budget: int | None = None,
    shares: Mapping[int, float] | None = None,
) -> None:
    """Replay the access sets of one group into the tally."""
    in_step, share = [], 1.0
    for index in range(len(run.steps)):
        share = (shares or {}).get(index, share)
        in_step.append(int(slots * share))
    slots = max(in_step) if budget is None else slots
    n_expert = run.shape.n_expert
    place = {layer: i for i, layer in enumerate(layers)}
    size = {layer: (run.shape.expert_bytes or {}).get(layer, 0) for layer in layers}
    policy = POLICIES[policy_name](len(layers), n_expert, slots, seed, run.shape.k, params)
    if run.shape.expert_bytes:
        policy.layer_bytes = [size[layer] for layer in layers]
    pool: SlotPool
    if budget is not None:
        pool = BytePool(policy, budget, lambda key: size[layers[key // n_expert]])
    elif run.semantics != "sglang":
        pool = (BypassPool if policy_name == "opt-bypass" else SlotPool)(policy, slots)

    sets = [s for s in run.sets if s.layer in place]
    cached = [
        on_cached_path(run, n, len(s.tokens)) for s, n in zip(run.steps, in_step, strict=True)
    ]
    served_sets = [s for s in sets if cached[s.step]]
    policy.uses_of_run = Counter(
        place[s.layer] * n_expert + e for s in served_sets for e in s.experts
    )
    coming = next_uses(served_sets, place, n_expert)[::-1]
    if run.semantics == "sglang":
        lookups = [e for s in served_sets for e in s.experts]
        never = len(lookups)
        first = {e: lookups.index(e) if e in lookups else never + e for e in range(n_expert)}
        pool = WavePool(policy, in_step[0], first)
    sets_of: dict[int, list[AccessSet]] = defaultdict(list)
    for s in sets:
        sets_of[s.step].append(s)
    for index, step in enumerate(run.steps):
        if budget is None and in_step[index] != pool.slots:
            pool.resize(in_step[index])
        if cached[index] and sets_of[index]:  # a step without a row in the group is not seen
            policy.on_step(len(step.tokens))
        for s in sets_of[index]:
            base = place[s.layer] * n_expert
            if cached[index]:
                policy.weight = {base + e: s.weight[e] for e in s.experts}
                served = pool.serve(place[s.layer], s.experts, coming.pop())
                by_cpu = on_decline == "cpu"
            else:
                served = Served({e for e in s.experts if base + e in pool.slot_of}, set(), 0)
                by_cpu = on_decline == "cpu" and slots == 0
            refused = len(s.experts) - len(served.hits) - len(served.uploaded)
            new = {
                "lookups": len(s.experts),
                "hits": len(served.hits),
                "misses": len(s.experts) - len(served.hits),
                "demand_uploads": len(served.uploaded),
                "streamed": 0 if by_cpu else refused,
                "cpu_served": refused if by_cpu else 0,
                "merged_runs": served.runs,
                "bytes_moved": size[s.layer] * (len(served.uploaded) + (not by_cpu) * refused),
                "picks": len(s.picks),
                "pick_hits": sum(e in served.hits for _, e in s.picks),
            }
            parts = [
                tally.total,
                tally.by_class[class_of(cached[index], len(step.tokens))],
                tally.by_phase["prefill" if step.prefill else "decode"],
                tally.by_layer[s.layer],
            ]
            if cached[index]:
                parts.append(tally.cached)
            for part in parts:
                for name, number in new.items():
                    part[name] += number
            for request, expert in s.picks:
                tally.by_request[request]["picks"] += 1
                tally.by_request[request]["pick_hits"] += expert in served.hits
            if run.semantics != "per-pick":
                for expert in s.experts:
                    tally.flags[s.step, s.layer, expert] = expert in served.hits
    if isinstance(pool, BytePool):
        tally.peak_bytes = pool.peak


def next_uses(
    sets: Sequence[AccessSet], place: Mapping[int, int], n_expert: int
) -> list[dict[int, int]]:
    """For each set and each of its keys the position of that key's next lookup in the whole run."""
    keys = [[place[s.layer] * n_expert + e for e in s.experts] for s in sets]
    position = horizon = sum(map(len, keys))
    upcoming: dict[int, int] = {}
    found: list[dict[int, int]] = []
    for members in reversed(keys):
        found.append({key: upcoming.get(key, horizon + key) for key in members})
        for key in reversed(members):
            position -= 1
            upcoming[key] = position
    return found[::-1]
