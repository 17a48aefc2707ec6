"""Prompts as they are read, and every failure of a capture as one clear line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="capturing needs torch: pip install 'simlab[capture]'")
pytest.importorskip("transformers", reason="capturing needs transformers")

import torch
import transformers
from capture_cases import Words, build, loaded, prompts, save_model

from simlab.capture.engine import Settings
from simlab.capture.prompts import Prompt, demo_prompts, read_prompts, tokenize
from simlab.capture.run import capture
from simlab.cli import main
from simlab.errors import SimlabError, UsageError
from simlab.trace.read import read_trace
from simlab.trace.write import STREAM_SUFFIX, recover_trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("abc def")
    return path


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "b.py").write_text("\ufeffprint()\n", encoding="utf-8")
    (tmp_path / "code" / ".hidden").write_bytes(b"\xff")
    (tmp_path / "a.txt").write_text("One.\nTwo.\n")
    turns = [{"role": "user", "content": "why?"}]
    lines = [{"messages": turns, "tag": "chat"}, {"prompt": "line\u2028two"}, {"text": "t"}]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n"
    (tmp_path / "c.jsonl").write_text(text, encoding="utf-8")
    top = tmp_path.name
    in_folder = [
        Prompt("a.txt", "One.\nTwo.\n", tag=top),
        Prompt("c.jsonl line 1", messages=tuple(turns), tag="chat"),
        Prompt("c.jsonl line 3", "line\u2028two", tag=top),
        Prompt("c.jsonl line 5", "t", tag=top),
        Prompt(str(Path("code", "b.py")), "print()\n", tag="code"),
    ]
    assert sorted(read_prompts([tmp_path]), key=lambda p: p.name) == in_folder
    alone = read_prompts([tmp_path / "c.jsonl", tmp_path / "a.txt"], tag="mixed")
    assert [p.tag for p in alone] == ["chat", "mixed", "mixed", "mixed"]
    assert [p.name for p in alone][-1] == "a.txt"


def test_embedded_texts() -> None:
    short, whole = demo_prompts(), demo_prompts(whole=True)
    assert {p.tag for p in short} == {"prose", "code", "mixed"}
    assert all(w.text.startswith(s.text) for s, w in zip(short, whole, strict=True))
    assert all(len(s.text) < len(w.text) for s, w in zip(short, whole, strict=True))


def test_a_chat_goes_through_the_template(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = Prompt("c", messages=({"role": "user", "content": "why?"},))
    (ids,) = tokenize([chat], tokenizer)
    assert tokenizer.decode(ids) == "user: why?\nassistant: "
    (ids,) = tokenize([chat], tokenizer, answer=False)
    assert tokenizer.decode(ids) == "user: why?\n"
    assert tokenize([Prompt("p", "12345")], tokenizer, limit=3) == [
        tokenizer("123")["input_ids"],
    ]


BAD_PROMPTS: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.txt", b" \n", "a.txt is empty"),
    "not UTF-8": ("a.txt", b"caf\xe9", "not UTF-8 text (byte 3)"),
    "no JSON": ("a.jsonl", b'{"prompt": "x"}\n{', "line 2 is not JSON"),
    "no object": ("a.jsonl", b"[1]", "line 1: write"),
    "no prompt": ("a.jsonl", b'{"tag": "x"}', 'neither "prompt" (text) nor "messages"'),
    "empty prompt": ("a.jsonl", b'{"prompt": " "}', "line 1: the prompt is empty"),
    "empty chat": ("a.jsonl", b'{"messages": []}', "must be a list of turns"),
    "no role": ("a.jsonl", b'{"messages": [{"content": "x"}]}', "must be a list of turns"),
    "tag": ("a.jsonl", b'{"prompt": "x", "tag": 3}', "the tag must be text"),
}


def one_line(args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that fails says."""
    assert main(["capture", *args]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("simlab: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, content, words = BAD_PROMPTS[name]
    (tmp_path / file).write_bytes(content)
    args = ["--prompts", str(tmp_path / file), "--out", str(tmp_path / "t.parquet")]
    assert words in one_line(args, 1, capsys)


def test_no_prompts(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "t.parquet")]
    absent = ["--prompts", str(tmp_path / "absent"), *out]
    assert "there is no file or folder" in one_line(absent, 2, capsys)
    (tmp_path / "empty").mkdir()
    empty = ["--prompts", str(tmp_path / "empty"), *out]
    assert "holds no prompt" in one_line(empty, 1, capsys)
    with pytest.raises(UsageError, match="no prompts"):
        read_prompts([])
    with pytest.raises(SimlabError, match="p: the tokenizer makes no token of it"):
        tokenize([Prompt("p", "")], Words())
    chat = Prompt("c", messages=({"role": "user", "content": "why?"},))
    with pytest.raises(SimlabError, match=r"c is a chat, but .* has no chat template"):
        tokenize([chat], Words())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(SimlabError, match="the chat template refuses it: roles must alternate"):
        tokenize([chat], tokenizer)


def test_where_the_trace_goes(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.parquet"
    assert "there is no folder" in one_line(["--out", str(tmp_path / "no" / "t")], 2, capsys)
    assert "is a folder" in one_line(["--out", str(tmp_path)], 2, capsys)
    out.write_bytes(b"precious")
    assert "is there already" in one_line(["--out", str(out)], 2, capsys)
    assert out.read_bytes() == b"precious"
    out.with_name(out.name + STREAM_SUFFIX).write_bytes(b"")
    assert "--resume" in one_line(["--out", str(out)], 2, capsys)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_the_packages(
    package: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    args = ["--prompts", str(text), "--out", str(tmp_path / "t.parquet")]
    line = one_line(args, 2, capsys)
    assert f"needs {package}: pip install 'simlab[capture]'" in line


def model_folder(path: Path, config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


DENSE = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 9,
         "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        (None, 2, "there is no such folder"),
        ("", 1, "config.json cannot be read"),
        ({}, 1, "of an architecture that transformers"),
        ({"model_type": "nonesuch"}, 1, "of an architecture that transformers"),
        ({"model_type": "nonesuch", "auto_map": {"AutoConfig": "c.C"}}, 1, "does not run"),
        (DENSE, 1, "Qwen2ForCausalLM: no MoE layer found"),
        ({"model_type": "vit"}, 1, "of an architecture that transformers"),
        # a MoE without its weights
        ({"model_type": "qwen3_moe", "num_hidden_layers": 1}, 1, "cannot be loaded"),
    ],
    ids=["absent", "damaged", "nothing", "unknown", "own code", "dense", "images", "no weights"],
)  # fmt: skip
def test_bad_models(
    config: Any,
    code: int,
    words: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = tmp_path / "model"
    if config is not None:
        model_folder(where, config)
    args = ["--model", str(where), "--prompts", str(text), "--out", str(tmp_path / "t.parquet")]
    assert words in one_line(args, code, capsys)


def test_names_that_are_no_folder(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["--prompts", str(text), "--out", str(tmp_path / "t.parquet"), "--model"]
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "is a file" in one_line([*args, str(tmp_path / "m.gguf")], 2, capsys)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in one_line([*args, str(tmp_path / "empty")], 1, capsys)
    assert "no such folder" in one_line([*args, "demoo"], 2, capsys)
    assert "add --download" in one_line([*args, "nobody/no-such-model"], 2, capsys)

    def unreachable(*_args: Any, **_kwargs: Any) -> None:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    line = one_line([*args, "nobody/no-such-model", "--download"], 1, capsys)
    assert "cannot download nobody/no-such-model: check the name and the network" in line


def test_devices_and_types(
    text: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = ["--prompts", str(text), "--out", str(tmp_path / "t.parquet"), "--model", str(folder)]
    line = one_line([*args, "--device", "cuda"], 2, capsys)
    assert "CUDA" in line
    assert "use --device cpu" in line
    assert "--device must be one of" in one_line([*args, "--device", "gpu"], 2, capsys)
    assert "--dtype must be one of" in one_line([*args, "--dtype", "int3"], 2, capsys)
    assert "--batch and --concurrency" in one_line(
        [*args, "--batch", "2", "--concurrency", "2"], 2, capsys
    )


def test_a_capture_from_the_command_line(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.parquet"
    args = ["--prompts", str(text), "--out", str(out), "--model", str(folder), "--device", "cpu"]
    args += ["--max-new-tokens", "4", "--ignore-eos", "--weights", "--dtype", "bfloat16"]
    assert main(["capture", *args, "--tag", "prose"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"{out}: {folder}, 1 requests, 7 prompt and 3 decode tokens, ")
    trace = read_trace(out, cache=False)
    assert trace.n_rows == 3 * (7 + 3)
    assert trace.weights is not None
    assert trace.meta.expert_bytes == ((2 * 16 * 32 * 2, 32 * 16 * 2),) * 3
    assert trace.meta.tags == {"0": "prose"}
    assert main(["capture", *args, "--force", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["prompt_tokens"], figures["decode_tokens"], figures["partial"]) == (7, 3, False)
    assert figures["content_hash"] == trace.meta.content_hash
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "t.parquet"]


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "a smaller --batch, or"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "a smaller --batch"),
        (MemoryError(), "a smaller --batch"),
        (RuntimeError("some kernel\nfailed"), "failed with RuntimeError: some kernel failed"),
    ],
    ids=["cuda", "cpu", "python", "other"],
)  # fmt: skip
def test_a_failure_on_the_way_keeps_what_was_captured(
    raised: Exception, words: str, tmp_path: Path
) -> None:
    model = build("full")
    forward, calls = model.forward, 0

    def failing(
        input_ids: Any, attention_mask: Any, position_ids: Any, cache: Any, use_cache: Any
    ) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise raised
        return forward(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
            use_cache=use_cache,
        )  # fmt: skip

    model.forward = failing
    asked = [Prompt("p", " ".join(map(str, text))) for text in prompts([5, 3])]
    out = tmp_path / "t.parquet"
    settings = Settings(max_new_tokens=9, batch=2)
    with pytest.raises(SimlabError) as failure:
        capture(loaded(model, ()), asked, out, settings)
    message = str(failure.value)
    assert words in message
    assert "\n" not in message
    stream = out.with_name(out.name + STREAM_SUFFIX)
    assert f"what was captured is in {stream} (go on with --resume" in message
    assert recover_trace(stream, out).partial
    assert read_trace(out, cache=False).n_rows == 3 * (5 + 3 + 2 * 3)
    # and it can be gone on with
    model.forward = forward
    stream.unlink()
    done = capture(loaded(model, ()), asked, out, settings, resume=True)
    assert (done.kept, done.prompt_tokens, done.decode_tokens) == (0, 8, 16)


def test_out_of_memory_while_loading(
    folder: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    args = ["--prompts", str(text), "--out", str(tmp_path / "t.parquet"), "--model", str(folder)]
    line = one_line([*args, "--device", "cpu"], 1, capsys)
    assert "out of memory while loading" in line
    assert "--dtype" in line
