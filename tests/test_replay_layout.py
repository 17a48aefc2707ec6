"""A trace replayed with another model's layout: its groups, bytes and layers in host memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_files import experts, write_gguf

from simlab.cli import main
from simlab.errors import UsageError
from simlab.model.layout import ExpertLayout, group_layers
from simlab.model.placement import place
from simlab.replay.run import replay_cell
from simlab.trace.schema import DECODE, PREFILL, Trace, TraceMeta
from simlab.trace.write import write_trace

LAYERS = (0, 1, 2, 3)


def a_trace(seed: int = 3, **meta: object) -> Trace:
    """Two requests over four layers, eight experts, two picks; a prompt, then 40 tokens each."""
    rng = np.random.default_rng(seed)
    tokens, layers = 44, len(LAYERS)
    rows = 2 * tokens * layers
    shape = {"n_expert": 8, "k": 2, "moe_layers": LAYERS, "expert_bytes": ((7,),) * 4, **meta}
    picks = np.stack([rng.permutation(8)[:2] for _ in range(rows)])
    return Trace(
        TraceMeta(**shape),  # type: ignore[arg-type]
        np.repeat(np.arange(2, dtype=np.int32), tokens * layers),
        np.tile(np.repeat(np.arange(tokens, dtype=np.int32), layers), 2),
        np.tile(np.repeat(np.where(np.arange(tokens) < 4, PREFILL, DECODE), layers), 2).astype(
            "u1"
        ),
        np.tile(np.array(LAYERS, np.int16), 2 * tokens),
        np.arange(rows + 1, dtype=np.int64) * 2,
        picks.reshape(-1).astype(np.uint16),
    )


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """Four layers; in 1 and 3 the down matrix is of another type."""
    tensors = []
    for layer in LAYERS:
        down = "Q6_K" if layer % 2 else "Q4_K"
        tensors += experts(layer, 8, 256, 256, ("Q4_K", "Q4_K", down))
    return write_gguf(tmp_path / "m.gguf", tensors, k=2, n_layers=4)[0]


def test_groups_and_bytes_are_the_layout_s(gguf: Path) -> None:
    layout = place(str(gguf)).layout
    sizes = [(36864, 36864, 36864), (36864, 36864, 53760)] * 2
    assert layout.hash == group_layers(8, 2, LAYERS, sizes).hash
    for concurrency in (1, 2):
        found = replay_cell(a_trace(), slots=[5, 9], concurrency=concurrency, layout=layout)
        # the same trace, captured at these types
        own = replay_cell(a_trace(expert_bytes=tuple(sizes)), slots=[5, 9], concurrency=concurrency)
        assert (found.counters, found.by_layer) == (own.counters, own.by_layer)
        assert found.layout_hash == own.layout_hash
        assert found.capacity_bytes == 5 * 110_592 + 9 * 127_488


def test_layers_on_the_device_are_not_looked_up(gguf: Path) -> None:
    layout = place(str(gguf), host_layers="1-3").layout
    whole = a_trace()
    kept = np.flatnonzero(whole.layer > 0)
    part = replace(
        whole,
        meta=replace(whole.meta, moe_layers=(1, 2, 3), expert_bytes=()),
        request=whole.request[kept], token=whole.token[kept], phase=whole.phase[kept],
        layer=whole.layer[kept], offsets=np.arange(len(kept) + 1, dtype=np.int64) * 2,
        experts=whole.experts.reshape(-1, 2)[kept].reshape(-1),
    )  # fmt: skip
    slots = [6, 4]
    found = replay_cell(whole, slots=slots, layout=layout)
    assert [g.layers for g in layout.groups] == [(1, 3), (2,)]
    alone = replay_cell(part, slots=slots, layout=replace(layout, resident=()))
    assert found.counters == alone.counters
    assert [each["layer"] for each in found.by_layer] == [1, 2, 3]
    assert "layers 0 stay on the device" in " ".join(found.notes)
    assert found.counters.tokens == replay_cell(whole, slots=6).counters.tokens
    # the trace itself is untouched
    assert whole.n_rows == 2 * 44 * 4 and whole.meta.moe_layers == LAYERS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_expert": 16}, "it has 8 experts a layer, the layout has 16"),
        ({"k": 3}, "it has k = 2, the layout has k = 3"),
        ({"layers": (0, 1, 2)}, "MoE layers 3, which the layout lacks"),
        ({"layers": (0, 1, 2, 3, 5, 6)}, "no MoE layers 5-6, which the layout has"),
        ({"layers": (1, 2, 3, 4), "k": 1}, "k = 2, the layout has k = 1; MoE layers 0"),
    ],
)
def test_a_trace_of_another_shape_is_refused(change: dict[str, object], message: str) -> None:
    shape = {"n_expert": 8, "k": 2, "layers": LAYERS, **change}
    layout: ExpertLayout = group_layers(tensor_bytes=(), **shape)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        replay_cell(a_trace(), slots=4, layout=layout)


def test_the_command(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.parquet"
    write_trace(a_trace(), trace)
    args = ["replay", str(trace), "--layout", str(gguf), "--policy", "lru", "--json"]
    assert main([*args, "--moe-cache-mib", "2,3"]) == 0
    two, three = json.loads(capsys.readouterr().out)
    wanted = []
    for mib in (2, 3):
        assert main(["plan", str(gguf), "--mib", str(mib), "--json"]) == 0
        wanted.append([g["slots"] for g in json.loads(capsys.readouterr().out)["groups"]])
    assert [two["slots_json"], three["slots_json"]] == wanted
    assert two["layout_hash"] == place(str(gguf)).layout.hash
    assert any("not those of the trace" in note for note in two["notes"])
    assert main([*args, "--moe-cache-mib", "2", "--n-cpu-moe", "2"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert [each["layer"] for each in row["by_layer"]] == [0, 1]
    assert main([*args, "--moe-cache-mib", "2", "--tensor-split", "1,1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert len(row["slots_json"]) == 3  # 0-2 on the first device: 0,2 and 1; 3 on the second
    assert main([*args, "--moe-cache-mib", "0.1"]) == 1
    assert "refuses to start below 1 MiB" in capsys.readouterr().err
