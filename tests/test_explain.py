"""``simlab explain``: causes, reuse distances and declined misses against slow counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_cases import sticky_trace
from naive import on_cached_path, prepare
from naive import replay as naive_replay
from strategies import SmallTrace, small_trace, small_traces

from simlab.analysis.explain import CAUSES, UNTAGGED, Explanation, explain
from simlab.analysis.reuse import reuse_distances
from simlab.cli import main
from simlab.errors import UsageError
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.trace.write import write_trace

MISSES = ("cold", "capacity", "policy", "large")


def sizes_of(case: SmallTrace) -> list[int]:
    return [max(case.shape.k, len(g) * case.shape.n_expert // 2) for g in case.shape.groups]


def explained(case: SmallTrace, policy: str, concurrency: int = 1, **options: str) -> Explanation:
    cell = Cell(load_policy(policy), tuple(sizes_of(case)), None, concurrency)
    return explain(Replayer(case.trace, **options), [cell])[0]


@settings(max_examples=60, deadline=None)
@given(small_traces(), st.sampled_from([1, 3]))
def test_the_split_is_that_of_a_slow_count(case: SmallTrace, concurrency: int) -> None:
    sizes = sizes_of(case)
    run = prepare(case.rows, case.shape, concurrency=concurrency)
    ours, best = (naive_replay(run, policy, sizes).flags for policy in ("lru", "opt"))
    slots = {x: n for g, n in zip(case.shape.groups, sizes, strict=True) for x in g}
    met: set[tuple[int, int]] = set()
    wanted: Counter[tuple[str, int, int]] = Counter()
    lucky = 0
    for s in run.sets:
        cached = on_cached_path(run, slots[s.layer], len(run.steps[s.step].tokens))
        for expert in s.experts:
            hit, opt_hit = ours[s.step, s.layer, expert], best[s.step, s.layer, expert]
            if hit:
                cause = "hit"
                lucky += cached and not opt_hit
            elif not cached:
                cause = "large"
            elif (s.layer, expert) not in met:
                cause = "cold"
            else:
                cause = "policy" if opt_hit else "capacity"
            wanted[cause, s.layer, expert] += 1
            if cached:
                met.add((s.layer, expert))
    found = explained(case, "lru", concurrency)
    assert found.total == {
        cause: sum(n for (c, _, _), n in wanted.items() if c == cause) for cause in CAUSES
    }
    assert found.lucky == lucky
    for part in found.by_layer:
        for cause in CAUSES:
            assert part[cause] == sum(
                n for (c, layer, _), n in wanted.items() if (c, layer) == (cause, part["layer"])
            )
    assert {
        (cause, part["layer"], part["expert"]): part[cause]
        for part in found.by_expert
        for cause in CAUSES
        if part[cause]
    } == wanted


@pytest.mark.parametrize("semantics", ["llama.cpp", "sglang", "per-pick", "bmoe"])
@pytest.mark.parametrize("policy", ["lru", "lrfu-admit"])
def test_every_sum_is_the_replay_s(semantics: str, policy: str) -> None:
    rnd = Random(f"{semantics} {policy}")
    for _ in range(20):
        case = small_trace(rnd)
        replayer = Replayer(case.trace, semantics=semantics)
        sizes = [
            max(1, replayer.layout.keys_of(i) // 2) for i in range(len(replayer.layout.groups))
        ]
        cell = Cell(load_policy(policy), tuple(sizes), None, 2)
        if semantics == "bmoe":
            cell = Cell(load_policy(policy), (), 60, 2)
        (found,) = explain(replayer, [cell])
        counters = found.row.counters
        assert sum(found.total[cause] for cause in MISSES) == counters.misses
        assert found.total["hit"] == counters.hits
        for parts in (found.by_layer, found.by_expert, found.by_window):
            for cause in CAUSES:
                assert sum(part[cause] for part in parts) == found.total[cause]
        for part, window in zip(found.by_window, found.row.windows, strict=True):
            assert (part["first_step"], part["last_step"]) == (
                window["first_step"], window["last_step"],
            )  # fmt: skip
            assert sum(part[cause] for cause in MISSES) == window["misses"]
        for part, layer in zip(found.by_layer, found.row.by_layer, strict=True):
            assert sum(part[cause] for cause in MISSES) == layer["misses"]
        if semantics == "llama.cpp" and policy == "lru":  # where the bound is one
            assert (
                found.total["policy"] - found.lucky == counters.misses - found.bound.counters.misses
            )


def test_tags_share_lookups_by_request() -> None:
    trace = sticky_trace()
    tags = {key: tag for key, tag in trace.meta.tags.items() if key != "5"}
    trace = trace.__class__(**{**vars(trace), "meta": trace.meta.with_(tags=tags)})
    (found,) = explain(Replayer(trace), [Cell(load_policy("lru"), (16,), None, 4)])
    assert [part["tag"] for part in found.by_tag] == [UNTAGGED, "a", "b"]
    for cause in CAUSES:
        assert sum(p[cause] for p in found.by_tag) == pytest.approx(found.total[cause])
    assert all(part["hit"] > 0 for part in found.by_tag)
    # alone, each request's lookups are its own
    (alone,) = explain(Replayer(trace), [Cell(load_policy("lru"), (16,))])
    assert [sum(p[c] for c in CAUSES) for p in alone.by_tag] == [240, 2880, 2640]


def naive_distances(keys: Sequence[int]) -> list[tuple[int, int]]:
    found = []
    for i, key in enumerate(keys):
        earlier = [j for j in range(i) if keys[j] == key]
        j = earlier[-1] if earlier else -1
        found.append((len(set(keys[j + 1 : i])) if earlier else -1, j))
    return found


@settings(max_examples=100, deadline=None)
@given(small_traces(), st.sampled_from([1, 3]))
def test_reuse_distances_are_those_of_a_slow_count(case: SmallTrace, concurrency: int) -> None:
    replayer = Replayer(case.trace)
    access = replayer.access(concurrency)
    rnd = Random(1)
    served = np.array([rnd.random() < 0.8 for _ in access.set_step], np.bool_)
    index = np.arange(len(case.shape.layers), dtype=np.int32)
    distance, previous = reuse_distances(access, served, index, case.shape.n_expert)
    of_lookup = np.repeat(served, np.diff(access.offsets))
    layer = np.repeat(access.set_layer, np.diff(access.offsets))
    keys = (layer.astype(int) * case.shape.n_expert + access.experts)[of_lookup].tolist()
    where = np.flatnonzero(of_lookup).tolist()
    wanted = naive_distances(keys)
    assert distance[of_lookup].tolist() == [d for d, _ in wanted]
    assert previous[of_lookup].tolist() == [where[j] if j >= 0 else -1 for _, j in wanted]
    assert (distance[~of_lookup] == -1).all()


def test_a_timeline_that_fills_up_is_closed_up() -> None:
    """More lookups than the timeline has places (1,024): the slow count again."""
    trace = sticky_trace(4, 100)
    access = Replayer(trace).access(1)
    served = np.ones(len(access.set_step), np.bool_)
    distance, previous = reuse_distances(access, served, np.arange(3, dtype=np.int32), 16)
    assert len(distance) == 2400 > 1024
    layer = np.repeat(access.set_layer, np.diff(access.offsets)).astype(int)
    wanted = naive_distances((layer * 16 + access.experts).tolist())
    assert list(zip(distance.tolist(), previous.tolist(), strict=True)) == wanted


def test_per_pick_lru_hits_what_is_within_the_slots() -> None:
    """Mattson: a reuse from less than S distinct keys away is what LRU with S slots hits."""
    trace = sticky_trace()
    for slots in (5, 12, 30):
        replayer = Replayer(trace, semantics="per-pick")
        (found,) = explain(replayer, [Cell(load_policy("lru"), (slots,))])
        assert found.reuse.within == found.total["hit"]
        assert found.reuse.missed_within == 0
        assert found.reuse.beyond + found.reuse.first == found.row.counters.misses
        assert sum(part["lookups"] for part in found.reuse.histogram) == (
            found.reuse.within + found.reuse.beyond
        )
        assert sum(part["misses"] for part in found.reuse.histogram) == found.reuse.beyond
        access = replayer.access(1)
        served = np.ones(len(access.set_step), np.bool_)
        far, _ = reuse_distances(access, served, np.arange(3, dtype=np.int32), 16)
        far = far[far >= 0]
        assert found.reuse.quantiles == {
            q: np.quantile(far, float(q), method="lower") for q in found.reuse.quantiles
        }
        for part in found.reuse.histogram:
            below = part["below"]
            assert part["lookups"] == ((far >= below // 2) & (far < below)).sum()


def test_declined_misses_by_hand() -> None:
    """What is declined is followed to the key's next lookup."""
    trace = sticky_trace(6, 40)
    (found,) = explain(Replayer(trace), [Cell(load_policy("lrfu-admit"), (12,))])
    replayer = Replayer(trace)
    outcome = replayer.outcomes(Cell(load_policy("lrfu-admit"), (12,))).outcome
    access = replayer.access(1)
    layer = np.repeat(access.set_layer, np.diff(access.offsets)).astype(int)
    keys = (layer * 16 + access.experts).tolist()
    best = replayer.outcomes(Cell(load_policy("opt"), (12,))).outcome
    fates = Counter()
    for i in np.flatnonzero(outcome == 2).tolist():
        later = [j for j in range(i + 1, len(keys)) if keys[j] == keys[i]]
        if not later:
            fates["never"] += 1
            continue
        between = len(set(keys[i + 1 : later[0]]))
        fates["soon" if between < 12 else "late"] += 1
        fates["bound_hits"] += best[later[0]] == 1 and outcome[later[0]] != 1
    declined = found.declined
    assert declined.total == fates["soon"] + fates["late"] + fates["never"] > 0
    assert {name: getattr(declined, name) for name in fates} == dict(fates)
    assert explain(replayer, [Cell(load_policy("lru"), (12,))])[0].declined is None


def test_below_the_cliff_lru_misses_what_opt_hits() -> None:
    """(3 - 1) x 2 = 4 slots: LRU hits nothing."""
    (found,) = explain(Replayer(sticky_trace()), [Cell(load_policy("lru"), (4,))])
    assert found.total["hit"] == 0 and found.lucky == 0
    assert found.total["cold"] == 48 and found.total["policy"] > 0
    assert found.to_dict()["below_cliff"] and found.row.cliff_slots == 4


def test_the_bound_explains_itself() -> None:
    (found,) = explain(Replayer(sticky_trace()), [Cell(load_policy("opt"), (12,))])
    assert found.total["policy"] == found.lucky == 0
    with pytest.raises(UsageError, match="--bound must be one of"):
        explain(Replayer(sticky_trace()), [], bound="lru")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("explain") / "sticky.parquet"
    write_trace(sticky_trace(), file)
    return str(file)


def test_the_command(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["explain", path, "--policy", "lrfu-admit", "--param", "margin=1", "--slots", "12,50%"]
    assert main([*line, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    one = told["cells"][0]
    assert sum(one["causes"][cause] for cause in MISSES) == one["misses"]
    assert len(one["by_expert"]) == 48 and len(one["by_tag"]) == 2
    assert one["params"]["margin"] == 1 and [c["slots"] for c in told["cells"]] == [[12], [24]]
    assert "explain" in told["provenance"]["command"]
    assert main([*line, "--by", "all", "--top", "2"]) == 0
    text = capsys.readouterr().out
    for words in ("by layer", "by expert", "by window", "by tag", "declined:", "cliff:", "reuse:"):
        assert words in text, words
    assert f"{one['causes']['policy']:,}" in text and "needs an engine change" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--by", "token"], "--by takes layer, expert, window, tag or all, not 'token'"),
        (["--top", "-1"], "--top must be 0 or more"),
        (["--bound", "lru"], "--bound must be one of opt, opt-bypass"),
        (["--policy", "lrv"], "did you mean"),
        (["--param", "x=1"], "policy lru has no parameter 'x'"),
        (["--slots", "0"], "at least 1 slot"),
        (["--slots", "many"], "--slots takes"),
        (["--concurrency", "-1"], "1 or more"),
        (["--on-decline", "drop"], "--on-decline must be one of"),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], words: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", path, *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1, err
