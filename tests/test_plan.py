"""Slots for a budget: from GGUF headers that the gguf package wrote, configs, the catalogue."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from gguf_files import experts, flash_next, qwen3_30b, write_gguf

from simlab.cli import main
from simlab.errors import SimlabError, UsageError
from simlab.model.budget import MIB, NothingCached, bank_bytes, group_budgets, slots_for_budget
from simlab.model.catalogue import FOLDER, entries, named_shape, parse_spans
from simlab.model.devices import devices_of_layers
from simlab.model.gguf_model import read_gguf
from simlab.model.layout import ExpertLayout
from simlab.model.placement import parse_bytes, place
from simlab.model.plan import cycle, plan
from simlab.model.shape import layout_for
from simlab.model.source import read_model

FILES = {
    "Qwen3-30B-A3B": (qwen3_30b, {}),
    "Qwen3.8-Flash-Next": (flash_next, {"arch": "qwen4exp", "k": 10, "name": "Flash Next"}),
}


def write(model: str, folder: Path, **options: int) -> Path:
    tensors, about = FILES[model]
    path = folder / f"{model}.gguf"
    return write_gguf(path, tensors(), **about, **options)[0]


def naive_slots(layout: ExpertLayout, mib: int, split: list[float]) -> list[int]:
    """llama.cpp's loops, one slot at a time, written from src/llama-moe-cache.cpp."""
    host = [len(g.layers) * layout.n_expert * sum(g.tensor_bytes) for g in layout.groups]
    used = sorted({g.device for g in layout.groups})
    whole = sum(split[d] for d in used)
    slots = []
    for group, own in zip(layout.groups, host, strict=True):
        device = sum(
            h for g, h in zip(layout.groups, host, strict=True) if g.device == group.device
        )
        budget = int(float(mib * 1024 * 1024) * split[group.device] / whole * own / device)
        n = 0
        while n < len(group.layers) * layout.n_expert:
            needed = 0
            for size in group.tensor_bytes:
                bank = size * (n + 2)
                while bank % 128:
                    bank += 1
                needed += bank
            if needed > budget:
                break
            n += 1
        slots.append(n if n >= layout.k else 0)
    return slots


@pytest.mark.parametrize("files", [1, 3])
def test_every_golden_row(shared: Path, tmp_path: Path, files: int) -> None:
    with open(shared / "golden" / "slot_budget.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    for model, (tensors, _) in FILES.items():
        per_file = 0 if files == 1 else -(-len(tensors()) // 3)
        path = write(model, tmp_path, per_file=per_file)
        assert len(list(tmp_path.glob(f"{model}*"))) == files
        layout = layout_for(read_gguf(path))
        for row in (row for row in rows if row["model"] == model):
            wanted = [int(n) for n in row["slots_per_group"].split(";")]
            assert (len(layout.layers), layout.n_expert, layout.k) == (
                int(row["host_layers"]), int(row["n_expert"]), int(row["k"]),
            )  # fmt: skip
            if any(wanted):
                assert slots_for_budget(layout, float(row["budget_mib"]))[0] == wanted, row
            else:
                with pytest.raises(NothingCached, match="refuses to start below 50 MiB"):
                    slots_for_budget(layout, float(row["budget_mib"]))


def test_the_command_on_the_article_s_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write("Qwen3-30B-A3B", tmp_path))
    assert main(["plan", path, "--moe-cache-mib", "10000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [g["slots"] for g in found["groups"]] == [1834, 1834]
    assert round(found["share"], 3) == 0.597
    assert (found["floor"], found["floor_all"], found["warnings"]) == (50, 50, [])
    assert round(found["expert_bytes"] / 2**30, 2) == 16.35
    assert [g["cycle"]["low"] for g in found["groups"]] == [192, 192]
    assert main(["plan", path, "--mib", "10000"]) == 0
    text = capsys.readouterr().out
    assert "1,834 of 3,072 (59.7 %)" in text
    assert "down Q6_K 1,290,240" in text
    assert main(["plan", path, "--mib", "50"]) == 0
    assert "slots    8 of 3,072" in (text := capsys.readouterr().out)
    assert text.count("near the floor") == 2
    assert main(["plan", path, "--mib", "49"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "llama.cpp refuses to start below 50 MiB" in err


def test_gate_and_up_of_one_layer_in_different_files(tmp_path: Path) -> None:
    tensors = experts(0, 8, 256, 256, ("Q4_K", "Q4_K", "Q6_K"))
    tensors += experts(1, 8, 256, 256, ("Q4_K", "Q4_K", "Q4_K"))
    files = write_gguf(tmp_path / "m.gguf", tensors, k=2, n_layers=2, per_file=1)
    assert len(files) == 6
    for named in files:
        shape = read_gguf(named)
        assert {layer: [t.size for t in parts] for layer, parts in shape.experts.items()} == {
            0: [36864, 36864, 53760],
            1: [36864, 36864, 36864],
        }


def test_same_bytes_of_other_types_are_another_group(tmp_path: Path) -> None:
    tensors = [t for i, q in enumerate(("Q4_0", "IQ4_NL", "Q4_0")) for t in experts(
        i, 8, 256, 256, (q, q, q))]  # fmt: skip
    shape = read_gguf(write_gguf(tmp_path / "m.gguf", tensors, k=2, n_layers=3)[0])
    assert [g.layers for g in layout_for(shape).groups] == [(0, 2), (1,)]


def test_layers_that_draft_and_biases_are_no_experts(tmp_path: Path) -> None:
    tensors = [t for i in range(3) for t in experts(i, 8, 256, 256, ("Q8_0",) * 3)]
    tensors.append(("blk.0.ffn_gate_exps.bias", (8, 256), "F32"))
    tensors.append(("blk.1.ffn_gate_shexp.weight", (256, 256), "F16"))
    numbers = {"qwen3moe.nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "m.gguf", tensors, k=2, n_layers=3, numbers=numbers)[0]
    shape = read_gguf(path)
    assert list(shape.experts) == [0, 1]
    assert shape.other_bytes == 8 * 256 * 4 + 256 * 256 * 2
    assert "layer 2 drafts tokens" in shape.notes[0]


def test_slots_equal_llama_cpp_s_loop(tmp_path: Path) -> None:
    """Odd sizes, three groups, two devices; budgets around every step of a slot."""
    tensors = experts(0, 8, 96, 32, ("Q4_0", "Q8_0", "F16"))
    tensors += experts(1, 8, 96, 32, ("Q4_1", "Q8_0", "F32"))
    tensors += experts(2, 8, 96, 32, ("Q4_0", "Q8_0", "F16"))
    tensors += experts(3, 8, 96, 32, ("Q5_0", "Q5_1", "Q8_0"))
    shape = read_gguf(write_gguf(tmp_path / "m.gguf", tensors, k=2, n_layers=4)[0])
    checked = 0
    for split in ([1.0], [3.0, 1.0], [1.0, 1.0, 2.0], [0.0, 1.0]):
        layout = layout_for(shape, devices=devices_of_layers(4, split))
        for thousandth in range(1, 900, 3):
            mib = thousandth / 1000
            try:
                found = slots_for_budget(layout, mib, split)[0]
            except NothingCached:
                found = [0] * len(layout.groups)
            budgets = group_budgets(layout, mib, split)
            for i, group in enumerate(layout.groups):
                n, most = found[i], layout.keys_of(i)
                if n == 0:
                    assert bank_bytes(group.tensor_bytes, layout.k) > budgets[i]
                else:
                    assert bank_bytes(group.tensor_bytes, n) <= budgets[i]
                    assert n == most or bank_bytes(group.tensor_bytes, n + 1) > budgets[i]
                    checked += 1
    assert checked > 500
    layout = layout_for(
        read_gguf(write("Qwen3-30B-A3B", tmp_path)), devices=devices_of_layers(48, [3.0, 2.0])
    )
    assert [(g.device, len(g.layers)) for g in layout.groups] == [(0, 14), (0, 16), (1, 8), (1, 10)]
    for mib in (101, 123, 1671, 4000):
        assert slots_for_budget(layout, mib, [3.0, 2.0])[0] == naive_slots(layout, mib, [3.0, 2.0])


def test_devices_are_cut_as_llama_cpp_cuts_them() -> None:
    """48 layers and the output: 49 places, cut at the running share."""
    halves = devices_of_layers(48, [1, 1])
    assert (halves.count(0), halves.count(1)) == (25, 23)  # 24/49 < 0.5 <= 25/49
    assert devices_of_layers(3, [0, 1]) == [1, 1, 1]
    assert set(devices_of_layers(48, [1] * 7)) == set(range(7))
    for wrong in ([], [0, 0], [-1, 2], [float("nan")], [float("inf")]):
        with pytest.raises(UsageError, match="--tensor-split"):
            devices_of_layers(4, wrong)


def test_some_layers_on_the_device(tmp_path: Path) -> None:
    path = str(write("Qwen3-30B-A3B", tmp_path))
    first = place(path, n_cpu_moe=20).layout
    assert first.layers == tuple(range(20)) and first.resident == tuple(range(20, 48))
    assert place(path, host_layers="0-9, 12").layout.layers == (*range(10), 12)
    assert first.hash != place(path).layout.hash
    with pytest.raises(UsageError, match="no MoE layer 48-50; its MoE layers are 0-47"):
        place(path, host_layers="40-50")
    with pytest.raises(UsageError, match="not both"):
        place(path, host_layers="1", n_cpu_moe=3)
    for wrong in ("", "5-3", "a", "1;2", "-1"):
        with pytest.raises(UsageError, match="layers are given as"):
            parse_spans(wrong)


def test_a_budget_from_device_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write("Qwen3-30B-A3B", tmp_path))
    device = read_gguf(path).other_bytes or 0
    embedding = 151936 * 2048 // 256 * 144
    args = ["plan", path, "--vram", "16GiB", "--reserve", "3GiB", "--json"]
    assert main(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device_bytes"] == device - embedding
    assert found["mib"] == (13 * 2**30 - found["device_bytes"]) // MIB
    assert main([*args[:2], "--vram", "8GiB,4GiB", "--json"]) == 0
    two = json.loads(capsys.readouterr().out)
    on_first = [len(g["group"]["layers"]) for g in two["groups"] if g["group"]["device"] == 0]
    assert sum(on_first) == 33  # 32/49 < 8/12 <= 33/49
    assert "rule of thumb" in two["notes"][-1]
    assert main([*args[:2], "--vram", "2GiB"]) == 2
    assert "leave no room" in capsys.readouterr().err
    assert main(["plan", "Mixtral-8x7B", "--vram", "24GiB"]) == 2
    assert "--vram needs a GGUF file" in capsys.readouterr().err
    assert parse_bytes("24", "--vram") == parse_bytes("24576 MiB", "--vram") == 24 * 2**30
    assert parse_bytes("1.5gb", "--vram") == 1_500_000_000


def test_slots_back_to_a_budget(tmp_path: Path) -> None:
    layout = layout_for(read_gguf(write("Qwen3-30B-A3B", tmp_path)))
    for wanted in (8, 305, 1834, 3072):
        found = plan(layout, slots=wanted)
        assert all(g.slots >= wanted for g in found.groups)
        assert min(slots_for_budget(layout, found.mib - 1)[0] if found.mib > 50 else [0]) < wanted
    with pytest.raises(UsageError, match="at least the 8 experts"):
        plan(layout, slots=7)


def test_warnings_follow_the_streams() -> None:
    layout = place("Qwen3.8-Flash-Next").layout
    assert cycle(48, 512, 10, 1) == cycle(48, 512, 10, 1)
    assert (cycle(48, 512, 10, 1).low, cycle(48, 512, 10, 1).high) == (480, 480)
    four = cycle(48, 512, 10, 4)
    assert (four.low, four.high) == (480, 1920) and 1860 < four.uniform < 1870
    assert cycle(1, 8, 4, 9).high == 8

    def said(slots: int, concurrency: int) -> str:
        return " ".join(plan(layout, slots=slots, concurrency=concurrency).warnings)

    assert "near the floor: up to 470" in said(400, 1)
    assert "below the cycle T = 480" in said(475, 1)
    assert said(481, 1) == ""
    assert "decode never uses the cache" in said(20, 4)
    assert "between 480 and 1,920" in said(1000, 4)
    assert said(1900, 4) == ""


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        (
            ["--napkin"],
            {
                "one": "2.64 MiB",
                "all": "24,576 experts, 63.3 GiB",
                "touched": "480 experts, 1,266 MiB",
            },
        ),
        (["--napkin"], {"PCIe 4.0 x16": "42.1 ms  at most 24 tok/s"}),
        (["--napkin"], {"PCIe 5.0 x16": "21.1 ms  at most 47 tok/s"}),
        (["--napkin", "--hit-rate", "77%"], {"PCIe 4.0 x16": "291 MiB     9.7 ms"}),
        (["--napkin", "--hit-rate", "89"], {"PCIe 4.0 x16": "139 MiB     4.6 ms"}),
    ],
)  # fmt: skip
def test_napkin_figures_of_the_article(
    text: list[str], figures: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "Qwen3.8-Flash-Next", *text]) == 0
    lines = capsys.readouterr().out.splitlines()
    for start, figure in figures.items():
        (line,) = [line for line in lines if line.strip().startswith(start)]
        assert figure in line


def test_napkin_of_any_link(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "gpt-oss-20b", "--napkin", "--link", "pcie3x4,25", "--hit-rate", "0,100"]
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["napkin"]
    assert found["expert_bytes"] == 13_219_200
    assert found["token_bytes"] == 24 * 4 * 13_219_200
    slow, fast, none, _ = found["crossings"]
    assert (slow["link"], slow["gb_s"]) == ("PCIe 3.0 x4", 3.9375)
    assert fast["ms"] == pytest.approx(24 * 4 * 13_219_200 / 25e9 * 1e3)
    assert (none["mib"], none["tok_s"]) == (0, None)
    assert main(args) == 0
    assert "no limit" in capsys.readouterr().out


def test_the_catalogue_names_its_sources_and_lacks_what_none_states() -> None:
    assert len(entries()) == len(list(FOLDER.glob("*.toml"))) == 10
    for name, entry in entries().items():
        figures = {*entry} - {"name", "aliases", "sources"}
        told = entry["sources"]
        named = {part for key in told for part in re.split(r",\s*", key)}
        assert "all" in named or figures <= named, f"{name}: no source for {figures - named}"
    for name, missing in (
        ("LFM2.5-24B-A2B", "number of layers, layers that have experts, hidden size"),
        ("Nemotron-3.5-Bolt-74B-A9B", "number of experts, experts per token"),
    ):
        with pytest.raises(UsageError, match=missing):
            named_shape(name)
    sizes = {name: named_shape(name) for name in ("Mixtral-8x7B", "DeepSeek-V2-Lite")}
    assert sizes["Mixtral-8x7B"].expert_bytes == 32 * 8 * 3 * 4096 * 14336 * 2
    assert list(sizes["DeepSeek-V2-Lite"].experts) == list(range(1, 27))
    lite = named_shape("deepseek-v2-lite-chat", dtype="q4_k,q4_k,iq4_nl").experts[1]
    assert sum(t.size for t in lite) == 4_866_048  # rows of 1408 do not divide into blocks of 256


def test_a_type_that_cannot_hold_the_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="rows of 640 values do not divide into Q4_K's blocks"):
        named_shape("Qwen3.8-Flash-Next", dtype="Q4_K")
    mixed = named_shape("Qwen3.8-Flash-Next", dtype="Q4_K,Q4_K,Q4_0").experts[0]
    assert [t.type_name for t in mixed] == ["Q4_K", "Q4_K", "Q4_0"]
    for wrong in ("Q9", "Q4_K,Q4_K", ""):
        with pytest.raises(UsageError, match="--dtype"):
            named_shape("Mixtral-8x7B", dtype=wrong)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "name one model"),
        (["Mixtral-8x7B"], 2, "give one of --moe-cache-mib"),
        (["Mixtral-8x7B", "--mib", "5", "--slots", "5"], 2, "give one of"),
        (["Mixtral-8x7B", "--mib", "0"], 2, "above 0"),
        (["Mixtral-8x7B", "--mib", "nan"], 2, "above 0"),
        (["Mixtral-8x7B", "--mib", "1"], 1, "refuses to start below"),
        (["Mixtral-8x7B", "--mib", "9999", "--concurrency", "0"], 2, "--concurrency"),
        (["Mixtral", "--mib", "5"], 2, "did you mean Mixtral-8x7B?"),
        (["nowhere/model", "--mib", "5"], 2, "no file or folder"),
        (["nowhere.gguf", "--mib", "5"], 2, "there is no file nowhere.gguf"),
        (["Mixtral-8x7B", "--vram", "lots"], 2, "--vram takes a size"),
        (["Mixtral-8x7B", "--vram", "9", "--tensor-split", "1,1"], 2, "a size for each"),
        (["Mixtral-8x7B", "--mib", "9999", "--tensor-split", "a"], 2, "--tensor-split"),
        (["Mixtral-8x7B", "--napkin", "--link", "usb"], 2, "--link takes"),
        (["Mixtral-8x7B", "--napkin", "--hit-rate", "101"], 2, "--hit-rate"),
        (["Mixtral-8x7B", "--napkin", "--hit-rate", "x"], 2, "--hit-rate"),
        (["Mixtral-8x7B", "--n-cpu-moe", "0", "--mib", "1"], 2, "--n-cpu-moe"),
        (["."], 2, "no file config.json"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("simlab: error: ")
    assert message in err


def test_configs(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 768,
        "mlp_only_layers": [0], "decoder_sparse_step": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder = tmp_path / "Some-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for named in (folder, folder / "config.json"):
        shape = read_model(str(named))
        assert (shape.name, list(shape.experts)) == ("Some-Model", [1, 2, 3])
        assert shape.layer_bytes(1) == 128 * 3 * 2048 * 768 * 2
    assert read_model(str(folder), dtype="Q4_K").layer_bytes(1) == 128 * 2_654_208
    with pytest.raises(UsageError, match="--dtype is for configs"):
        read_model(str(write("Qwen3-30B-A3B", tmp_path)), dtype="Q4_K")
    for bad, kind, message in (
        ("{", SimlabError, "not valid JSON"),
        ("[" * 100_000, SimlabError, "not valid JSON"),
        ("[1]", SimlabError, "no JSON object"),
        ("{}", UsageError, "does not say: number of layers"),
        (json.dumps({**config, "num_experts": "many"}), UsageError, "number of experts"),
        (json.dumps({**config, "num_experts": 4}), UsageError, "cannot use 8 of 4"),
        (json.dumps({**config, "num_hidden_layers": 10**9}), UsageError, "number of layers"),
        (json.dumps({**config, "mlp_only_layers": [0, 1, 2, 3]}), UsageError, "no layer"),
        (json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}), UsageError,
         "type of the expert weights"),
    ):  # fmt: skip
        (folder / "config.json").write_text(bad)
        with pytest.raises(kind, match=message):
            read_model(str(folder))
    with pytest.raises(UsageError, match="name a file in it"):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"first_k_dense_replace": 2}, [2, 3, 4, 5]),
        ({"num_dense_layers": 1}, [1, 2, 3, 4, 5]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
        ({"moe_layer_freq": [0, 1, 0, 1, 1, 1]}, [1, 3, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"interleave_moe_layer_step": 2}, [1, 3, 5]),
        ({"moe_layers": [1, 4]}, [1, 4]),
        ({"moe_layers_enum": "4,5"}, [4, 5]),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, [1, 3, 5]),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4}, [1, 2, 3, 4]),
        ({"mlp_layer_types": ["dense", "sparse", "moe", "dense", "hash_moe", "moe"]}, [1, 2, 4, 5]),
        ({"hybrid_override_pattern": "M-EM*E"}, [2, 5]),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe", "mlp", "moe"]}, [1, 3, 5]),
    ],
)  # fmt: skip
def test_rules_which_layers_have_experts(rule: dict[str, object], layers: list[int]) -> None:
    from simlab.model.hf_config import moe_layers

    assert moe_layers(rule, 6) == layers
