"""Advice: memory to the byte, milliseconds by hand, and the lines to type."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simlab.analysis.advise import GIB, Adviser, Machine
from simlab.cli import main
from simlab.cli.advise_text import llama_cpp_line, sglang_line
from simlab.cost.presets import COPY_US, Rate, device_rate, host_rate, link_rate
from simlab.errors import SimlabError, UsageError
from simlab.model.budget import MIB
from simlab.model.kv import kv_bytes_per_token, longest_context
from simlab.model.shape import ExpertTensor, ModelShape, layout_for
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer, replay_cell
from simlab.trace.schema import DECODE, PREFILL, Trace, TraceMeta
from simlab.trace.write import write_trace

LAYERS, EXPERTS, K, TOKENS = 4, 8, 2, 200
SIZE = 3 * 4 * MIB  # bytes of one expert: three tensors of 4 MiB


def model(other: int | None = 100 * MIB) -> ModelShape:
    tensors = tuple(
        ExpertTensor(name, "Q8_0", (2048, 2048), SIZE // 3) for name in ("gate", "up", "down")
    )
    return ModelShape(
        name="small",
        source="small.gguf",
        n_expert=EXPERTS,
        k=K,
        n_layers=LAYERS + 1,
        experts={layer: tensors for layer in range(1, LAYERS + 1)},
        other_bytes=other,
        input_bytes=10 * MIB,
    )


def trace(phase: int = DECODE, layers: int = LAYERS) -> Trace:
    rng = np.random.default_rng(5)
    rows = TOKENS * layers
    weights = np.arange(1, EXPERTS + 1) ** 2.0
    picks = [rng.choice(EXPERTS, K, False, weights / weights.sum()) for _ in range(rows)]
    return Trace(
        TraceMeta(n_expert=EXPERTS, k=K, moe_layers=tuple(range(1, layers + 1)), source="test"),
        np.repeat(np.arange(4, dtype=np.int32), rows // 4),
        np.tile(np.repeat(np.arange(TOKENS // 4, dtype=np.int32), layers), 4),
        np.full(rows, phase, np.uint8),
        np.tile(np.arange(1, layers + 1, dtype=np.int16), TOKENS),
        np.arange(rows + 1, dtype=np.int64) * K,
        np.concatenate(picks).astype(np.uint16),
    )


def machine(vram: int, **more: object) -> Machine:
    given: dict[str, object] = {
        "vram": vram,
        "ram": None,
        "reserve": 10 * MIB,
        "link": Rate(10.0, ""),
        "device": Rate(100.0, ""),
        "cpu": Rate(20.0, ""),
    }
    return Machine(**{**given, **more})  # type: ignore[arg-type]


def adviser(vram: int = 400 * MIB, streams: int = 1, **more: object) -> Adviser:
    return Adviser(
        model(), machine(vram, **more), trace(), kv_token=1024, context=1024, streams=streams
    )


def test_memory_is_counted_to_the_byte() -> None:
    found = adviser(400 * MIB, streams=2)
    assert found.kv() == 2 * MIB and found.kv(2048) == 4 * MIB
    free = 400 - 10 - (100 - 10) - 2
    assert found.room(0) == free * MIB
    layer = EXPERTS * SIZE // MIB
    assert found.room(1) == (free - layer) * MIB
    assert found.most_resident() == free // layer == 3
    choice = found.choose(1)
    assert choice.mib == free - layer
    assert choice.used == 400 * MIB
    assert choice.host == 3 * layer * MIB + 10 * MIB


def test_milliseconds_by_hand() -> None:
    found = adviser()
    step = K * LAYERS * SIZE  # at one stream each pick is a lookup
    assert found.base_ms == pytest.approx((90 * MIB + step) / 100e9 * 1e3)
    cpu = found.choose(0, 0)
    assert cpu.decode_ms == pytest.approx((90 * MIB / 100e9 + step / 20e9) * 1e3)
    assert cpu.hit_rate is None and cpu.mib_per_token == 0
    cached = found.choose(0, 150)
    (slots,) = cached.slots
    row = replay_cell(trace(), policy="lru", slots=slots, prefill="skip")
    assert cached.hit_rate == row.hit_rate
    misses = row.counters.misses
    seconds = misses * SIZE / 10e9 + row.counters.merged_runs * 3 * COPY_US / 1e6
    assert cached.decode_ms == pytest.approx(found.base_ms + seconds / TOKENS * 1e3)
    assert cached.tok_s == pytest.approx(1000 / cached.decode_ms)
    # at the break-even rate uploads cost what the CPU costs
    assert cached.break_even is not None
    at_even = found.base_ms + (1 - cached.break_even) * (cached.decode_ms - found.base_ms) / (
        misses / row.counters.lookups
    )
    assert at_even == pytest.approx(cpu.decode_ms)
    kept = found.choose(4, None) if found.room(4) >= 0 else None
    assert kept is None
    assert adviser(step_ms=7.0).base_ms == 7.0


def test_all_layers_resident_needs_nothing_else() -> None:
    found = adviser(1 * GIB)
    best = found.search()[0]
    assert (best.resident, best.mib, best.slots) == (LAYERS, 0, ())
    assert best.decode_ms == pytest.approx(found.base_ms)
    assert llama_cpp_line(found, best) == "llama-server -m small.gguf -c 1024 -np 1 -lv 4"


def test_the_search_finds_the_best_of_all_placements() -> None:
    for vram in (200, 300, 400, 480):
        found = adviser(vram * MIB)
        every = [
            found.choose(n, mib) for n in range(found.most_resident() + 1) for mib in (None, 0.0)
        ]
        assert found.search()[0].decode_ms == min(c.decode_ms for c in every)


def test_a_slow_link_says_that_the_cache_does_not_pay() -> None:
    found = adviser(200 * MIB, link=Rate(0.5, ""), cpu=Rate(90.0, ""))
    choices = found.search()
    assert choices[0].mib == 0
    cached = [c for c in choices if c.mib]
    assert cached and all(
        c.break_even is not None and c.hit_rate is not None and c.hit_rate < c.break_even
        for c in cached
    )


def test_more_memory_is_worth_something_and_context_costs() -> None:
    found = adviser(400 * MIB)
    best = found.choose(0, 2048)
    worth = found.worth_of_a_gib(best)
    assert worth["cache"] == pytest.approx(0, abs=1e-9)  # all experts fit already
    small = found.choose(0, 100)
    assert (found.worth_of_a_gib(small)["cache"] or 0) > 0
    sizes = [c.mib if c else -1 for _, c in found.contexts(found.choose(0), 2**19)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == -1 and sizes[0] > 0


def test_the_lines_to_type() -> None:
    found = adviser(400 * MIB, streams=2)
    assert llama_cpp_line(found, found.choose(0, 200)) == (
        "llama-server -m small.gguf -cmoe --moe-cache-mib 200 -c 2048 -np 2 -lv 4"
    )
    # layers 1 to 4 have experts; with two of them resident the first 3 layers (0, 1, 2) are not
    assert "--n-cpu-moe 3 --moe-cache-mib 50" in llama_cpp_line(found, found.choose(2, 50))
    line = sglang_line(found, found.choose(0, 200))
    assert line is not None and "--enable-paged-experts --paged-experts-num-resident 3 " in line
    assert sglang_line(found, found.choose(0, 0)) is None


def test_what_cannot_be() -> None:
    with pytest.raises(SimlabError, match="do not fit"):
        adviser(50 * MIB).search()
    with pytest.raises(UsageError, match="bytes of the weights beside the experts"):
        Adviser(model(None), machine(GIB), trace(), kv_token=1, context=1, streams=1)
    with pytest.raises(UsageError, match="no decode tokens"):
        Adviser(model(), machine(GIB), trace(PREFILL), kv_token=1, context=1, streams=1)
    with pytest.raises(UsageError, match="does not fit the layout"):
        Adviser(model(), machine(GIB), trace(layers=3), kv_token=1, context=1, streams=1)


def test_kv_bytes_of_known_headers() -> None:
    qwen = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 48,
        "qwen3moe.attention.head_count": 32,
        "qwen3moe.attention.head_count_kv": 4,
        "qwen3moe.attention.key_length": 128,
        "qwen3moe.attention.value_length": 128,
        "qwen3moe.embedding_length": 2048,
        "qwen3moe.context_length": 262144,
    }
    assert kv_bytes_per_token(qwen) == 48 * 4 * (128 + 128) * 2 == 98304
    assert longest_context(qwen) == 262144
    plain = {k: v for k, v in qwen.items() if "_length" not in k or "embedding" in k}
    assert kv_bytes_per_token(plain) == 48 * 4 * (64 + 64) * 2
    hybrid = {**qwen, "qwen3moe.attention.head_count_kv": [0, 0, 0, 4] * 12}
    assert kv_bytes_per_token(hybrid) == 98304 // 4
    latent = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 27,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.rope.dimension_count": 64,
    }
    assert kv_bytes_per_token(latent) == 27 * (512 + 64) * 2
    for broken in ({}, {"general.architecture": "x"}, {**qwen, "qwen3moe.block_count": "48"}):
        assert kv_bytes_per_token(broken) is None
    assert longest_context({}) is None


def test_presets_say_where_they_come_from() -> None:
    assert link_rate("pcie4x16").gb_s == pytest.approx(0.8 * 31.5)
    assert "80%" in link_rate("pcie5x8").source and link_rate("6.28") == Rate(6.28, "as given")
    assert host_rate("DDR5x2").gb_s == pytest.approx(33.6)
    assert device_rate("RTX 4090").gb_s == pytest.approx(504)
    for call in (link_rate, host_rate, device_rate):
        with pytest.raises(UsageError):
            call("fast")
        with pytest.raises(UsageError):
            call("-1")


SAMPLE = [
    "Qwen3-30B-A3B", "--dtype", "Q4_K", "--other-bytes", "1.6GiB", "--kv-bytes", "98304",
    "--vram", "16GiB",
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--vram", "16GiB"], "name one model", 2),
        (["Qwen3-30B-A3B", "--vram", "much"], "--vram takes a size", 2),
        (["Qwen3-30B-A3B", "--vram", "16GiB", "--ctx", "0"], "--ctx must be 1 or more", 2),
        (["Qwen3-30B-A3B", "--vram", "16GiB", "--parallel", "0"], "--parallel", 2),
        (["Qwen3-30B-A3B", "--vram", "16GiB", "--link", "usb"], "--link takes", 2),
        (["Qwen3-30B-A3B", "--vram", "16GiB", "--gpu", "best"], "--gpu takes", 2),
        (["Qwen3-30B-A3B", "--vram", "16GiB", "--step-ms", "0"], "--step-ms", 2),
        (["Qwen3-30B-A3B", "--vram", "16GiB"], "give --kv-bytes", 2),
        (["Qwen3-30B-A3B", "--vram", "16GiB", "--kv-bytes", "1"], "give --other-bytes", 2),
        (["no-such-model", "--vram", "16GiB"], "not in the catalogue", 2),
        ([*SAMPLE[:-1], "2GiB"], "do not fit", 1),
        ([*SAMPLE, "--trace", "absent.parquet"], "No such file", 1),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(trace(), tmp_path / "t.parquet")
    monkeypatch.setattr("simlab.model.source.read_model", lambda text, dtype=None: model())
    arguments = ["advise", "small.gguf", "--vram", "400MiB", "--reserve", "10MiB", "--ctx", "1024"]
    arguments += ["--kv-bytes", "1024", "--trace", str(tmp_path / "t.parquet"), "--ram", "100MiB"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "predicted" and found["streams"] == 1
    times = [choice["decode_ms"] for choice in found["choices"] if not choice["pinned"]]
    assert times == sorted(times) and len(times) >= 4
    assert any("do not fit the 0.1 GiB of host memory" in note for note in found["notes"])
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "PREDICTED" in out and found["llama_cpp"] in out


def test_pinned_experts_take_the_room_of_slots() -> None:
    found = adviser(500 * MIB)
    best = found.choose(0, 330)
    (slots,) = best.slots
    few, more = found.with_pins(best)
    assert (few.pinned, more.pinned) == (slots // LAYERS // 4, slots // LAYERS // 2)
    for choice in (few, more):
        assert (choice.mib, choice.slots, choice.used) == (best.mib, best.slots, best.used)
        row = Replayer(trace(), layout=layout_for(model()), prefill="skip", pin=choice.pinned).run(
            Cell(load_policy("lru"), best.slots)
        )
        assert choice.hit_rate == row.hit_rate != best.hit_rate
    assert found.with_pins(found.choose(0, 0)) == []
