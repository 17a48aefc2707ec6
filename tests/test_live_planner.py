"""The planner and the hot path: the replayer's answers, nothing allocated, bad input named."""

from __future__ import annotations

import tracemalloc
from random import Random

import numpy as np
import pytest
from strategies import small_trace

from simlab.errors import SimlabError, UsageError
from simlab.live.planner import GroupPlanner, Planner
from simlab.model.layout import group_layers
from simlab.policy.registry import load_policy
from simlab.replay.kernel import DECLINED, HIT, LARGE_HIT, LARGE_STREAMED, UPLOADED


def one_group(policy: str = "lru", *, slots: int = 6, **options: int) -> GroupPlanner:
    return GroupPlanner(load_policy(policy), layers=2, n_expert=8, k=3, slots=slots, **options)


def plan(planner: GroupPlanner, layer: int, picks: list[int], tokens: int = 1) -> dict[str, list]:
    planner.plan(layer, np.array(picks, np.int64), tokens)
    n, fills, runs = planner.counts.tolist()
    return {
        "experts": planner.experts[:n].tolist(),
        "outcome": planner.outcome[:n].tolist(),
        "slots": planner.slots[:n].tolist(),
        "fills": planner.fills[:fills].tolist(),
        "runs": planner.runs[:runs].tolist(),
    }


def test_what_a_plan_says() -> None:
    planner = one_group()
    # repeats count once, in first-seen order; uploads go up in ascending expert id
    assert plan(planner, 0, [4, 2, 3, 2]) == {
        "experts": [4, 2, 3],
        "outcome": [UPLOADED] * 3,
        "slots": [2, 0, 1],
        "fills": [[2, 0, -1], [3, 1, -1], [4, 2, -1]],
        "runs": [[2, 0, 3]],
    }
    planner.begin_step()
    found = plan(planner, 0, [3, 7, 5])
    assert found["outcome"] == [HIT, UPLOADED, UPLOADED]
    assert found["slots"] == [1, 4, 3]
    assert found["runs"] == [[5, 3, 1], [7, 4, 1]]
    # expert 3 of another layer is another key; the least recent of layer 0 leave
    found = plan(planner, 1, [3, 0, 1])
    assert found["fills"] == [[0, 5, -1], [1, 0, 2], [3, 2, 4]]
    assert planner.resident.tolist() == [9, 3, 11, 5, 7, 8]


def test_a_step_that_fails_the_gate_only_reads() -> None:
    planner = one_group(slots=6)
    plan(planner, 0, [1, 2, 3])
    planner.begin_step()
    before = planner.resident.copy()
    found = plan(planner, 0, [1, 5, 6, 2, 7, 0], tokens=3)  # 3 x 3 > 6 slots
    assert planner.is_large
    assert found["outcome"] == [
        LARGE_HIT, LARGE_STREAMED, LARGE_STREAMED, LARGE_HIT, LARGE_STREAMED, LARGE_STREAMED,
    ]  # fmt: skip
    assert found["slots"] == [0, -1, -1, 1, -1, -1]
    assert found["fills"] == found["runs"] == []
    assert (planner.resident == before).all()


def test_a_declined_miss_has_no_slot() -> None:
    planner = one_group("lfu-decay", slots=3)
    for _ in range(3):
        plan(planner, 0, [1, 2, 3])
    found = plan(planner, 0, [1, 2, 5])
    assert found["outcome"] == [HIT, HIT, DECLINED]
    assert found["slots"][2] == -1


@pytest.mark.parametrize("policy", ["lru", "clock", "mix"])
def test_the_count_of_sets_may_wrap(policy: str) -> None:
    """A set has a number of 32 bits, which a server reaches within days."""
    rng = Random(7)
    new, old = one_group(policy), one_group(policy)
    old.cache.now[0] = 2**32 - 50
    for _ in range(200):
        picks = rng.sample(range(8), 3)
        layer = rng.randrange(2)
        new.begin_step()
        old.begin_step()
        assert plan(new, layer, picks) == plan(old, layer, picks)
    assert old.cache.now[0] == 150


@pytest.mark.parametrize("pick", [8, -1, 2**40])
def test_a_pick_that_is_no_expert(pick: int) -> None:
    with pytest.raises(SimlabError, match=rf"a router picked expert {pick} of 8"):
        plan(one_group(), 0, [1, pick])


def test_a_bound_is_refused() -> None:
    with pytest.raises(UsageError, match="opt knows the future"):
        one_group("opt")


def test_planning_allocates_nothing() -> None:
    """Beyond what Python itself passes around: no array is made, nothing is kept."""
    layout = group_layers(64, 8, range(12), [(8, 8)] * 6 + [(8, 16)] * 6)
    planner = Planner(load_policy("mix"), layout, [96, 96])
    rnd = Random(0)
    steps = [[np.array(rnd.sample(range(64), 8), np.int64) for _ in range(12)] for _ in range(60)]

    def run(some: list[list[np.ndarray]]) -> None:
        for step in some:
            planner.begin_step(1)
            for layer, picks in enumerate(step):
                planner.plan(layer, picks)

    run(steps[:20])
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    run(steps[20:])
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 2000
    assert peak - before < 4000  # an array of one access set alone would have its 100 bytes each


def test_the_hot_path_makes_no_tensors_but_views() -> None:
    """Every operation that a step gives to torch, on the cpu device."""
    pytest.importorskip("torch", reason="live mode needs torch: pip install 'simlab[capture]'")
    from live_cases import loaded
    from torch.utils._python_dispatch import TorchDispatchMode

    from simlab.live.bank import Bank
    from simlab.live.device import open_device
    from simlab.live.engine import Engine, Run
    from simlab.live.picks import picks_of
    from simlab.live.serve import CachedPath
    from simlab.replay.run import Replayer

    operations: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.add(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    case = small_trace(Random(3))
    replayer = Replayer(case.trace)
    layout, access = replayer.layout, replayer.access(2)
    at = {n: (g, i) for g, group in enumerate(layout.groups) for i, n in enumerate(group.layers)}
    layers = [at[n] for n in case.trace.meta.moe_layers]
    slots = [layout.keys_of(g) // 2 for g in range(len(layout.groups))]
    with open_device("cpu") as device:
        bank = Bank(layout, device)
        engine = Engine(device, bank, access, *picks_of(case.trace, access), layers, slots)
        planner = Planner(loaded("lru"), layout, slots)
        run = Run.of(access)
        serve = [CachedPath(engine, g, planner, run, stream=True) for g in range(len(slots))]
        with Watch():
            engine.run(serve, run, begin_step=planner.begin_step)
    assert run.n_bytes.sum() > 0
    assert operations <= {"aten.copy_", "aten.slice", "aten.select"}, operations
