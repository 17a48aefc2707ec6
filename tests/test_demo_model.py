"""The demo model: it loads as any Qwen3-MoE, writes the same text each time, and has learned."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from simlab.capture import demo
from simlab.cli import main
from simlab.errors import SimlabError
from simlab.resources import find_trace
from simlab.trace.read import read_trace
from simlab.trace.schema import DECODE, PREFILL

#: Most bits per byte on the passages that come with simlab; measured: 1.790, 1.800, 1.837.
BOUNDS = {"prose": 1.9, "code": 1.9, "mixed": 1.95}
MOST_BYTES = 12_000_000


def test_texts_are_held_out_passages_of_three_kinds() -> None:
    texts = demo.demo_texts()
    assert {text.tag for text in texts} == {"prose", "code", "mixed"}
    assert len({text.id for text in texts}) == len(texts) >= 20
    for text in texts:
        assert 2500 < len(text.text) <= 3000
        assert 300 < len(text.prompt) <= demo.PROMPT_CHARS
        assert text.text.startswith(text.prompt)


def test_weights_and_tokenizer_are_small_and_the_shape_is_as_documented() -> None:
    folder = demo.demo_folder()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] * config["num_experts"] >= 1500
    assert config["num_experts_per_tok"] >= 4


def test_a_damaged_install_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_HERE", tmp_path)
    with pytest.raises(SimlabError, match=r"config\.json is missing in .*; reinstall simlab"):
        demo.demo_folder()
    demo.demo_texts.cache_clear()
    with pytest.raises(SimlabError, match="demo texts cannot be read"):
        demo.demo_texts()


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SimlabError, match=r"pip install 'simlab\[capture\]'"):
        demo.load_demo_model()


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, simlab.capture.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_captured_sample_is_what_it_is_said_to_be(repo: Path) -> None:
    path = find_trace("tiny-demo-model")
    assert path.stat().st_size <= 1_000_000
    trace = read_trace(path, cache=False)  # checks the order, the range and the content hash
    meta = trace.meta
    assert (meta.model, meta.kind, meta.partial) == (demo.LABEL, "captured", False)
    assert (meta.n_expert, meta.k, meta.moe_layers) == (128, 8, tuple(range(12)))
    assert meta.command == "simlab capture --out tiny-demo-model.parquet"
    assert {"simlab", "torch", "transformers"} <= set(meta.versions)
    assert meta.tags == {str(i): text.tag for i, text in enumerate(demo.demo_texts())}
    requests, tokens = np.unique(trace.request[trace.layer == 0], return_counts=True)
    assert len(requests) >= 12
    assert tokens.min() >= 64
    assert 2_000 <= ((trace.phase == DECODE) & (trace.layer == 0)).sum() <= 5_000
    said = (repo / "traces" / "README.md").read_text()
    for word in (path.name, demo.LABEL, meta.command, meta.content_hash[:16]):
        assert word in said


@pytest.fixture(scope="module")
def loaded():
    pytest.importorskip("torch", reason="the demo model needs torch (simlab[capture])")
    pytest.importorskip("transformers", reason="the demo model needs transformers")
    return demo.load_demo_model()


def test_it_is_an_ordinary_qwen3_moe(loaded) -> None:
    import torch

    model, tokenizer = loaded
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.dtype == torch.float32
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (128, 16, 128)
    assert experts.down_proj.shape == (128, 128, 8)
    assert len(model.model.layers) == 12
    assert len(tokenizer) == model.config.vocab_size == 2048
    text = 'def naïve(x):\n    return "—"\n'
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_greedy_text_is_the_same_each_time(loaded) -> None:
    import torch

    model, tokenizer = loaded
    given = tokenizer(demo.demo_texts()[0].prompt, return_tensors="pt")
    runs = []
    for _ in range(2):
        with torch.inference_mode():
            made = model.generate(**given, max_new_tokens=24, do_sample=False)
        runs.append(made[0, given.input_ids.shape[1] :].tolist())
    assert runs[0] == runs[1]
    assert len(runs[0]) == 24
    assert len(set(runs[0])) > 5


def test_the_captured_sample_came_from_this_model(loaded) -> None:
    """Its prompts are routed as the model routes them (rounding may differ on another CPU)."""
    import torch

    from simlab.capture.hooks import attach

    model, tokenizer = loaded
    trace = read_trace(find_trace("tiny-demo-model"), cache=False)
    same = total = 0
    for i, text in enumerate(demo.demo_texts()):
        with attach(model) as tap, torch.inference_mode():
            model(**tokenizer(text.prompt, return_tensors="pt"))
            picks = tap.take().experts()
        rows = np.flatnonzero((trace.request == i) & (trace.phase == PREFILL))
        there = trace.experts[trace.offsets[rows[0]] : trace.offsets[rows[-1] + 1]]
        there = there.reshape(picks.shape)  # as many tokens
        same += (np.sort(picks, -1) == np.sort(there, -1)).all(-1).sum()
        total += len(rows)
    assert same / total > 0.99


@pytest.mark.parametrize("tag", ["prose", "code", "mixed"])
def test_it_has_learned_text_that_it_did_not_see(loaded, tag: str) -> None:
    import torch

    model, tokenizer = loaded
    bits = size = 0.0
    for text in demo.demo_texts():
        if text.tag == tag:
            ids = tokenizer(text.text).input_ids[:512]
            given = torch.tensor([[tokenizer.eos_token_id, *ids[:-1]]])
            with torch.inference_mode():
                logits = model(given).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="sum")
            bits += loss.item() / math.log(2)
            size += len(tokenizer.decode(ids).encode())
    assert bits / size < BOUNDS[tag]


def test_a_damaged_checkpoint_is_one_clear_line(
    loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "demo_model"
    shutil.copytree(demo.demo_folder(), copy)
    os.truncate(copy / "model.safetensors", 100_000)
    monkeypatch.setattr(demo, "_HERE", tmp_path)
    with pytest.raises(SimlabError, match=r"cannot be loaded: .*; reinstall simlab") as caught:
        demo.load_demo_model()
    assert "\n" not in str(caught.value)


def test_what_was_trained_computes_what_transformers_computes(
    loaded, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training code's own forward pass against Qwen3MoeForCausalLM: logits and picks."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(repo / "scripts" / "demo_model"))
    from model import DemoModel
    from train import save_model

    trained = DemoModel(seed=3)
    for parameter in trained.parameters():
        parameter.data = parameter.data.half().float()
    tokenizer = Tokenizer.from_file(str(demo.demo_folder() / "tokenizer.json"))
    save_model(trained, tokenizer, tmp_path / "model")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    seen = []
    for layer in other.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    tokens = torch.randint(2, 2048, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = other(tokens).logits
        logits, _, picks = trained(tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(picks, seen, strict=True):
        assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)


def test_the_compiled_experts_have_the_right_gradients(
    loaded, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.syspath_prepend(str(repo / "scripts" / "demo_model"))
    from model import DemoModel, _Mixture

    layer = DemoModel(seed=1).layers[0]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(48, 128, generator=generator).requires_grad_()
    scores, ids = torch.randn(48, 128, generator=generator).softmax(-1).topk(8)
    weights = scores.clone().requires_grad_()
    wanted = (x, weights, layer.gate_up, layer.down)
    direction = torch.randn(48, 128, generator=generator)
    fast = torch.autograd.grad(
        _Mixture.apply(x, ids, weights, layer.gate_up, layer.down), wanted, direction
    )
    gate, up = torch.einsum("nd,nkjd->nkj", x, layer.gate_up[ids]).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * up
    plain = torch.einsum("nkj,nkjd,nk->nd", hidden, layer.down[ids], weights)
    for ours, theirs in zip(fast, torch.autograd.grad(plain, wanted, direction), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_capture_runs_it_on_lanes_and_one_thread_and_repeats_itself(
    loaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        hashes = []
        for name in ("a.parquet", "b.parquet"):
            args = ["--out", str(tmp_path / name), "--max-new-tokens", "4", "--ignore-eos"]
            assert main(["capture", *args, "--device", "cpu"]) == 0
            said = " ".join(capsys.readouterr().out.split())
            assert "tiny demo model, 22 requests, 3,124 prompt and 66 decode tokens" in said
            meta = read_trace(tmp_path / name, cache=False).meta
            hashes.append(meta.content_hash)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert hashes[0] == hashes[1]
    assert any(note.startswith("continuous batching over 8 lanes") for note in meta.notes)
    assert meta.device.endswith(", 1 thread)")
