"""SGLang's paged experts: an example worked by hand, with waves; and what is said of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simlab.cli import main
from simlab.errors import UsageError
from simlab.policy.registry import load_policy
from simlab.replay.access import FIRST_SEEN
from simlab.replay.cell import Cell
from simlab.replay.kernel import HIT, UPLOADED
from simlab.replay.run import Replayer, replay_cell
from simlab.trace.schema import DECODE, PREFILL, Trace, TraceMeta
from simlab.trace.write import write_trace


def trace_of(tokens: list[tuple[int, list[list[int]]]], n_expert: int, k: int) -> Trace:
    """One request; a token is (phase, picks of each layer)."""
    layers = len(tokens[0][1])
    rows = [picks for _, token in tokens for picks in token]
    n = len(rows)
    return Trace(
        TraceMeta(
            n_expert=n_expert, k=k, moe_layers=tuple(range(layers)), expert_bytes=((10,),) * layers
        ),
        np.zeros(n, np.int32),
        np.repeat(np.arange(len(tokens), dtype=np.int32), layers),
        np.repeat([phase for phase, _ in tokens], layers).astype(np.uint8),
        np.tile(np.arange(layers, dtype=np.int16), len(tokens)),
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
        np.array([e for picks in rows for e in picks], np.uint16),
    )


def outcomes(trace: Trace, slots: int, **options: object) -> list[tuple[int, dict[int, str]]]:
    """Per access set its layer, and what became of each member."""
    replayer = Replayer(trace, semantics="sglang", **options)  # type: ignore[arg-type]
    assert replayer.order == FIRST_SEEN and len(replayer.pools) == len(trace.meta.moe_layers)
    cell = Cell(load_policy("lru"), (slots,) * len(replayer.pools))
    found = replayer.outcomes(cell)
    names = {HIT: "hit", UPLOADED: "upload"}
    bounds = found.access.offsets
    return [
        (
            int(layer),
            {
                int(found.access.experts[i]): names[int(found.outcome[i])]
                for i in range(bounds[s], bounds[s + 1])
            },
        )
        for s, layer in enumerate(found.access.set_layer)
    ]


def test_an_example_worked_by_hand() -> None:
    """One layer, six experts, three slots. The list is written from the oldest to the newest.

    start                 0 1 2 resident              0 1 2
    token 0 picks 4 1     1 hits; 4 evicts 0          2 1 4
    token 1 picks 0 2     2 hits; 0 evicts 1          4 2 0
    a prompt that picks 5 0 1 3 4 (first seen), five members in three slots:
      line: residents 0 4 first, then 1 3 5 ascending
      wave 1: 0 4 1       0 and 4 hit; 1 evicts 2     0 4 1
      wave 2: 3 5         3 evicts 0, 5 evicts 4      1 3 5
    token picks 1 4       1 hits, 4 evicts 3          5 1 4
    token picks 3 0       0 evicts 5, 3 evicts 1      4 0 3
    token picks 4 3       both hit
    """
    trace = trace_of(
        [
            (DECODE, [[4, 1]]),
            (DECODE, [[0, 2]]),
            (PREFILL, [[5, 0]]),
            (PREFILL, [[1, 3]]),
            (PREFILL, [[4, 0]]),
            (DECODE, [[1, 4]]),
            (DECODE, [[3, 0]]),
            (DECODE, [[4, 3]]),
        ],
        n_expert=6,
        k=2,
    )
    assert outcomes(trace, 3) == [
        (0, {4: "upload", 1: "hit"}),
        (0, {0: "upload", 2: "hit"}),
        (0, {5: "upload", 0: "hit", 1: "upload", 3: "upload", 4: "hit"}),
        (0, {1: "hit", 4: "upload"}),
        (0, {3: "upload", 0: "upload"}),
        (0, {4: "hit", 3: "hit"}),
    ]
    result = replay_cell(trace, semantics="sglang", slots=3)
    counters = result.counters
    assert (counters.lookups, counters.hits, counters.demand_uploads) == (15, 7, 8)
    assert (counters.streamed, counters.cpu_served, counters.bytes_moved) == (0, 0, 80)
    assert result.by_phase["prefill"].hits == 2
    assert result.pool == "layer"
    assert any("not checked against SGLang" in note for note in result.notes)


def test_layers_do_not_share_their_slots() -> None:
    """Layer 1 picks many experts; layer 0 keeps its own two."""
    tokens = [(DECODE, [[0, 1], [i % 4, (i + 1) % 4]]) for i in range(8)]
    trace = trace_of(tokens, n_expert=4, k=2)
    found = outcomes(trace, 2)
    assert all(set(what.values()) == {"hit"} for layer, what in found if layer == 0)
    assert sum(list(what.values()).count("upload") for layer, what in found if layer == 1) == 7
    shared = replay_cell(trace, slots=[4], layout=None)
    assert shared.counters.misses != 7


def test_one_slot_takes_waves_of_one() -> None:
    trace = trace_of([(DECODE, [[2, 0, 1]]), (DECODE, [[2, 0, 1]])], n_expert=3, k=3)
    # 0 is resident: wave 0, wave 1, wave 2; then 2 is resident: waves 2, 0, 1
    assert outcomes(trace, 1) == [
        (0, {2: "upload", 0: "hit", 1: "upload"}),
        (0, {2: "hit", 0: "upload", 1: "upload"}),
    ]


def test_all_experts_resident_never_miss() -> None:
    rng = np.random.default_rng(2)
    tokens = [(DECODE, [list(rng.permutation(8)[:3])]) for _ in range(20)]
    assert replay_cell(trace_of(tokens, 8, 3), semantics="sglang", slots=8).counters.misses == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "mix", "opt", "lfu-decay"])
def test_other_policies_and_the_bound(policy: str) -> None:
    rng = np.random.default_rng(4)
    tokens = [(DECODE, [list(rng.permutation(8)[:3]) for _ in range(2)]) for _ in range(40)]
    trace = trace_of(tokens, 8, 3)
    found = replay_cell(trace, semantics="sglang", policy=policy, slots=4)
    best = replay_cell(trace, semantics="sglang", policy="opt", slots=4)
    lowest = replay_cell(trace, semantics="sglang", policy="opt-bypass", slots=4)
    assert lowest.counters.misses <= best.counters.misses <= found.counters.misses
    waves = replay_cell(trace, semantics="sglang", policy="opt", slots=2)
    assert any("not a proven bound" in note for note in waves.notes)
    assert not any("not a proven bound" in note for note in best.notes)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(6)
    tokens = [(DECODE, [list(rng.permutation(8)[:3]) for _ in range(2)]) for _ in range(9)]
    path = str(tmp_path / "t.parquet")
    write_trace(trace_of(tokens, 8, 3), path)
    args = ["replay", path, "--semantics", "sglang", "--policy", "lru"]
    assert main([*args, "--slots", "50%,3"]) == 0
    out = capsys.readouterr().out
    assert "4 x 2" in out and "3 x 2" in out
    assert "a model of SGLang's paged experts, not checked against SGLang" in out
    assert main([*args, "--moe-cache-mib", "10"]) == 2
    assert "counted in experts a layer" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--semantics must be one of"):
        Replayer(trace_of(tokens, 8, 3), semantics="vllm")
