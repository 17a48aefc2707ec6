"""Prompts for a capture: text files, JSONL files and folders of both, with a tag each.

A text file is one prompt. A JSONL file holds one a line: ``{"messages": [{"role": "user",
"content": "..."}]}``, which goes through the tokenizer's chat template, or ``{"prompt": "..."}``;
``"tag"`` is optional. A folder is read whole, in the order of the names; a file of a folder is
tagged with the name of the folder that it lies in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simlab.capture.demo import demo_texts
from simlab.errors import SimlabError, UsageError

_JSONL = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Prompt:
    """One request to be.

    Attributes:
        name: where it came from, for messages: "chat.jsonl line 3".
        text: what to continue, or "" for a chat.
        messages: the turns of a chat, as the tokenizer's template takes them.
        tag: what kind of text it is (prose, code, chat...), or "".
    """

    name: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tag: str = ""


def read_prompts(paths: Iterable[str | Path], *, tag: str = "") -> list[Prompt]:
    """The prompts of files and folders, in the order given.

    Args:
        tag: for prompts that have none of their own.

    Raises:
        UsageError: a file is not there, or there is no prompt at all.
        SimlabError: a file is empty, not UTF-8, or holds a line that is no prompt.
    """
    found: list[Prompt] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            found += _folder(path)
        else:
            found += _file(path, path.name)
    if not found:
        raise UsageError("no prompts: name a text file, a JSONL file, or a folder of them")
    return [prompt if prompt.tag else replace(prompt, tag=tag) for prompt in found]


def _folder(folder: Path) -> Iterator[Prompt]:
    def hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(folder).parts)

    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not hidden(p)]
    if not files:
        raise SimlabError(f"{folder} holds no prompt: there is no file in it")
    for path in files:
        for prompt in _file(path, str(path.relative_to(folder))):
            yield prompt if prompt.tag else replace(prompt, tag=path.parent.resolve().name)


def _file(path: Path, name: str) -> list[Prompt]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"there is no file or folder {path} to take prompts from") from None
    except UnicodeDecodeError as exc:
        raise SimlabError(
            f"{path} is not UTF-8 text (byte {exc.start}): save it as UTF-8, or leave it out"
        ) from None
    except OSError as exc:
        raise SimlabError(f"cannot read {path}: {exc.strerror}") from None
    if not text.strip():
        raise SimlabError(f"{path} is empty: write a prompt into it, or leave it out")
    if path.suffix.lower() not in _JSONL:
        return [Prompt(name, text)]
    # not splitlines(): JSON texts may hold other line separators
    lines = enumerate(text.split("\n"), 1)
    return [_line(line, f"{name} line {number}") for number, line in lines if line.strip()]


def _line(line: str, name: str) -> Prompt:
    """One line of a JSONL file."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise SimlabError(f"{name} is not JSON ({exc})") from None
    if not isinstance(raw, dict):
        raise SimlabError(f'{name}: write {{"prompt": "..."}} or {{"messages": [...]}}')
    tag = raw.get("tag") or ""
    if not isinstance(tag, str):
        raise SimlabError(f"{name}: the tag must be text")
    if "messages" in raw:
        messages = raw["messages"]
        good = isinstance(messages, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content")
            for m in messages
        )
        if not good or not messages:
            raise SimlabError(f"{name}: messages must be a list of turns with role and content")
        return Prompt(name, messages=tuple(messages), tag=tag)
    text = raw.get("prompt", raw.get("text"))
    if not isinstance(text, str):
        raise SimlabError(f'{name} has neither "prompt" (text) nor "messages"')
    if not text.strip():
        raise SimlabError(f"{name}: the prompt is empty")
    return Prompt(name, text, tag=tag)


def tokenize(
    prompts: Sequence[Prompt], tokenizer: Any, *, limit: int | None = None, answer: bool = True
) -> list[list[int]]:
    """Token ids of every prompt.

    Args:
        tokenizer: a transformers tokenizer.
        limit: longer prompts are cut after so many tokens.
        answer: a chat ends where the assistant's turn begins; False leaves it as it is.

    Raises:
        SimlabError: there is no chat template for a chat, or it refuses the turns, or a prompt
            has no token.
    """
    found = []
    for prompt in prompts:
        if prompt.messages:
            ids = _chat(prompt, tokenizer, answer)
        else:
            ids = tokenizer(prompt.text)["input_ids"]
        ids = list(ids)[:limit]
        if not ids:
            raise SimlabError(f"{prompt.name}: the tokenizer makes no token of it")
        found.append(ids)
    return found


def _chat(prompt: Prompt, tokenizer: Any, answer: bool) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise SimlabError(
            f"{prompt.name} is a chat, but this model has no chat template: write the text under"
            ' "prompt"'
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in prompt.messages], tokenize=False, add_generation_prompt=answer
        )
    except Exception as exc:  # a template raises what it likes
        reason = " ".join(str(exc).split())[:200]
        raise SimlabError(f"{prompt.name}: the chat template refuses it: {reason}") from None
    # the template has written the special tokens already
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def demo_prompts(*, whole: bool = False) -> list[Prompt]:
    """The embedded texts: their beginnings, to be continued, or the whole passages."""
    return [
        Prompt(text.id, text.text if whole else text.prompt, tag=text.tag) for text in demo_texts()
    ]
