"""The replayer against its slow twin, against the best that is possible, and against itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import Run, Shape, Tally, prepare
from naive import replay as naive_replay
from naive_all import OTHER_PARAMS, POLICIES
from naive_bounds import fewest_misses, fewest_misses_bypassing
from strategies import SmallTrace, small_trace, small_traces, weights_of

from simlab.policy.loader import Policy
from simlab.policy.registry import load_policy, policy_names
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.result.schema import Result

#: under bmoe every miss is inserted, so the bound that may decline does not exist there
SEMANTICS = {
    "llama.cpp": tuple(POLICIES),
    "per-pick": tuple(POLICIES),
    "bmoe": tuple(name for name in POLICIES if name != "opt-bypass"),
    "sglang": tuple(POLICIES),
}
ALWAYS_FILLING = tuple(name for name in POLICIES if not load_policy(name).declines)
COMPARED = (
    "lookups",
    "hits",
    "misses",
    "demand_uploads",
    "streamed",
    "cpu_served",
    "merged_runs",
    "bytes_moved",
    "picks",
    "pick_hits",
)
N_TRACES = 300
N_SIZES = 5
CHUNKS = 10
THIRDS = 3  # of the policies, for one trace each in the run that everybody waits for


@cache
def loaded(name: str) -> Policy:
    """A policy by name; read once, since each look-up hashes its sources."""
    return load_policy(name)


def test_every_policy_has_a_twin() -> None:
    assert set(POLICIES) == set(policy_names())


def compare(result: Result, run: Run, tally: Tally) -> None:
    """Every counter of a result and of its parts is the twin's, and they conserve lookups."""

    def same(found: Mapping[str, Any], wanted: Counter[str], what: str) -> None:
        assert {n: found[n] for n in COMPARED} == {n: wanted[n] for n in COMPARED}, what

    total = result.counters
    total.check("total")
    assert total.steps == len(run.steps)
    assert total.tokens == sum(len(step.tokens) for step in run.steps)
    assert result.hit_rate == tally.hit_rate
    same(asdict(total), tally.total, "total")
    for name, part in result.by_class.items():
        part.check(name)
        same(asdict(part), tally.by_class[name], name)
    for name, part in result.by_phase.items():
        same(asdict(part), tally.by_phase[name], name)
    for layer in result.by_layer:
        same(layer, tally.by_layer[layer["layer"]], f"layer {layer['layer']}")
    assert {layer["layer"] for layer in result.by_layer} == set(run.shape.layers)
    by_request = {r["request"]: (r["picks"], r["pick_hits"]) for r in result.by_request}
    assert {r: counts for r, counts in by_request.items() if counts[0]} == {
        r: (counts["picks"], counts["pick_hits"]) for r, counts in tally.by_request.items()
    }
    for name in COMPARED:
        assert sum(window[name] for window in result.windows) == getattr(total, name), name
    busy = [len(step.tokens) for step in run.steps if not step.prefill]
    assert result.busy_lanes == pytest.approx(sum(busy) / len(busy) if busy else 0)
    assert result.peak_bytes == (tally.peak_bytes if run.semantics == "bmoe" else None)


def sizes_of(case: SmallTrace, semantics: str = "llama.cpp") -> list[list[int]]:
    """Slots per pool: the least for one token, some, none for a group, all but one, too many.

    Under ``sglang`` a third of a layer's experts is often fewer than a set: waves.
    """
    groups = [[x] for x in case.shape.layers] if semantics == "sglang" else case.shape.groups
    keys = [len(group) * case.shape.n_expert for group in groups]
    sizes = [
        [case.shape.k for _ in keys],
        [max(1, n // 3) for n in keys],
        [max(1, n * 2 // 3) if i else 0 for i, n in enumerate(keys)],
        [max(1, n - 1) for n in keys],
        [n + 5 for n in keys],
    ]
    assert len(sizes) == N_SIZES
    return sizes


def replayed(
    case: SmallTrace, semantics: str, rnd: Random, policies: Sequence[str], sizes: Sequence[int]
) -> Iterator[tuple[Result, Run, Tally]]:
    """One trace under drawn engine options; the i-th policy at sizes[i], sizes[i] + 1, ... ."""
    prefill, on_decline = rnd.choice(["engine", "skip"]), rnd.choice(["stream", "cpu"])
    schedule, concurrency = rnd.choice(["lanes", "lanes", "recorded"]), rnd.choice([1, 2, 3, 12])
    if schedule == "recorded":
        concurrency = 1  # the steps are the trace's own
    ubatch, seed = rnd.choice([512, 4]), rnd.randint(0, 2**31)
    if all(row[2] == 0 for row in case.rows):
        prefill = "engine"
    replayer = Replayer(
        case.trace,
        semantics=semantics,
        prefill=prefill,
        on_decline=on_decline,
        schedule=schedule,
        ubatch=ubatch,
        seed=seed,
    )
    steps = case.step_of_row if schedule == "recorded" else None
    weights = [weights_of(row) for row in case.rows]
    run = prepare(case.rows, case.shape, semantics, concurrency, prefill, ubatch, steps, weights)
    for number, policy in enumerate(policies):
        for size in sizes:
            params = rnd.choice([{}, OTHER_PARAMS.get(policy, {})])
            slots = sizes_of(case, semantics)[(number + size) % N_SIZES]
            budget = None
            if semantics == "bmoe":
                budget, slots = 20 * sum(slots) + 7, []
            clipped = tuple(min(n, replayer.layout.keys_of(g)) for g, n in enumerate(slots))
            tally = naive_replay(
                run,
                policy,
                slots,
                capacity_bytes=budget,
                on_decline=on_decline,
                seed=seed,
                params=params,
            )
            cell = Cell(loaded(policy), clipped, budget, concurrency, params)
            yield replayer.run(cell), run, tally


def check_chunk(semantics: str, chunk: int, every_size: bool) -> None:
    """A tenth of the traces: under a third of the policies, or under all of them at every size."""
    per_chunk = N_TRACES // CHUNKS
    for number in range(chunk * per_chunk, (chunk + 1) * per_chunk):
        case = small_trace(Random(number))
        sizes = range(N_SIZES) if every_size else [number]
        policies = SEMANTICS[semantics]
        if not every_size:
            policies = policies[number % THIRDS :: THIRDS]
        cells = replayed(case, semantics, Random(number), policies, sizes)
        for result, run, tally in cells:
            try:
                compare(result, run, tally)
            except AssertionError as error:
                where = (
                    f"trace {number}: {result.policy} at {result.slots}, C = {result.concurrency},"
                    f" {result.schedule}, {result.prefill}, {result.on_decline}"
                )
                raise AssertionError(f"{where}: {error}") from error


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_kernel_is_the_naive_twin(semantics: str, chunk: int) -> None:
    """300 traces x all semantics, a third of the policies in turn, each at another size."""
    check_chunk(semantics, chunk, every_size=False)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_kernel_is_the_naive_twin_at_every_size(semantics: str, chunk: int) -> None:
    """300 traces x every policy x all semantics x all sizes."""
    check_chunk(semantics, chunk, every_size=True)


@settings(max_examples=20, deadline=None)
@given(small_traces(), st.sampled_from(tuple(SEMANTICS)), st.integers(0, N_SIZES - 1))
def test_kernel_is_the_naive_twin_on_any_trace(case: SmallTrace, semantics: str, size: int) -> None:
    """The same with cases that hypothesis can shrink."""
    cells = replayed(case, semantics, Random(size), ("lru", "random", "mix"), [size])
    for result, run, tally in cells:
        compare(result, run, tally)


# ---- bounds -------------------------------------------------------------------------------------


def cached_misses(result: Result) -> int:
    """Misses of the cached path: what a bound bounds; the large path fills nothing."""
    if result.semantics != "llama.cpp":
        return result.counters.misses
    return result.counters.misses - result.by_class["large"].misses


@pytest.mark.parametrize("semantics", ["llama.cpp", "per-pick"])
def test_no_policy_beats_the_bounds(semantics: str) -> None:
    for number in range(60):
        case = small_trace(Random(1000 + number))
        replayer = Replayer(case.trace, semantics=semantics)
        slots = tuple(
            min(n, replayer.layout.keys_of(group))
            for group, n in enumerate(sizes_of(case)[number % N_SIZES])
        )
        misses = {
            policy: cached_misses(replayer.run(Cell(loaded(policy), slots, None, 1 + number % 3)))
            for policy in POLICIES
        }
        assert misses["opt"] == min(misses[policy] for policy in ALWAYS_FILLING), misses
        assert misses["opt-bypass"] == min(misses.values()), misses


def one_pool(case: SmallTrace, semantics: str) -> Replayer:
    """All layers in one group: the trace forgets what its experts weigh."""
    trace = case.trace
    meta = trace.meta.with_(expert_bytes=())
    return Replayer(replace(trace, meta=meta), semantics=semantics)


@pytest.mark.parametrize("semantics", ["llama.cpp", "per-pick"])
def test_bounds_are_what_trying_every_choice_finds(semantics: str) -> None:
    compared = 0
    for number in range(120):
        case = small_trace(Random(number), max_requests=2, max_tokens=4, decode_only=True)
        shape = Shape([case.shape.layers], case.shape.n_expert, case.shape.k)
        concurrency = 1 + number % 2
        sets = [
            frozenset((s.layer, e) for e in s.experts)
            for s in prepare(case.rows, shape, semantics, concurrency).sets
        ]
        ids = {key: i for i, key in enumerate(sorted(frozenset().union(*sets)))}
        if len(sets) > 40 or len(ids) > 14:
            continue
        keyed = [frozenset(ids[key] for key in members) for members in sets]
        smallest = min(concurrency * shape.k, shape.n_expert) if semantics == "llama.cpp" else 1
        replayer = one_pool(case, semantics)
        for slots in (smallest, min(smallest + 2, replayer.layout.n_keys)):
            found = {
                policy: replayer.run(Cell(loaded(policy), (slots,), None, concurrency))
                for policy in ("opt", "opt-bypass")
            }
            assert found["opt"].counters.misses == fewest_misses(keyed, slots)
            lowest = fewest_misses_bypassing(keyed, slots)
            assert found["opt-bypass"].counters.misses == lowest
            compared += 1
    assert compared >= 80


@pytest.mark.parametrize("semantics", ["llama.cpp", "per-pick"])
def test_lru_misses_never_rise_with_slots(semantics: str) -> None:
    """While all steps pass the gate; a size at which another step passes it is another story."""
    for number in range(40):
        case = small_trace(Random(2000 + number), decode_only=True)
        concurrency = 1 + number % 3
        smallest = min(concurrency * case.shape.k, case.shape.n_expert)
        replayer = one_pool(case, semantics)
        misses = [
            replayer.run(Cell(loaded("lru"), (slots,), None, concurrency)).counters.misses
            for slots in range(smallest, replayer.layout.n_keys + 1)
        ]
        assert misses == sorted(misses, reverse=True), number
        assert misses[-1] == len({(row[3], e) for row in case.rows for e in row[4]})
