"""The tiny demo model that comes with simlab, and the texts for it.

A Qwen3-MoE of 12 layers x 128 experts with 8 picks a layer, trained for simlab on public-domain
prose and PSF-licensed Python (docs/demo-model.md). The folder loads with transformers' ordinary
``AutoModelForCausalLM.from_pretrained``. Its routing is that of a tiny model: whatever is computed
from it is labelled with LABEL.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from simlab.errors import SimlabError

#: How figures from this model are labelled, and its name in a trace's metadata.
LABEL = "tiny demo model"
#: Characters of a text that make its prompt.
PROMPT_CHARS = 400

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class DemoText:
    """A passage of about 3,000 characters from a document that the model was not trained on.

    Attributes:
        id: source and document, and the passage's place in it.
        tag: "prose", "code" or "mixed" (documentation of code).
        text: the passage.
    """

    id: str
    tag: str
    text: str

    @property
    def prompt(self) -> str:
        """The beginning, to be continued by the model: about PROMPT_CHARS, whole words."""
        return self.text[: self.text.rindex(" ", 0, PROMPT_CHARS)].rstrip()


def demo_folder() -> Path:
    """Where the model is: configuration, weights (float16 safetensors) and tokenizer.

    Raises:
        SimlabError: it is not there (a damaged install).
    """
    folder = _HERE / "demo_model"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise SimlabError(f"the demo model's {name} is missing in {folder}; reinstall simlab")
    return folder


@cache
def demo_texts() -> tuple[DemoText, ...]:
    """The passages, prose first, then code, then mixed.

    Raises:
        SimlabError: the file is missing or damaged (a damaged install).
    """
    path = _HERE / "demo_texts.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(DemoText(**json.loads(line)) for line in lines)
    except (OSError, ValueError, TypeError) as exc:
        raise SimlabError(f"the demo texts cannot be read ({exc}); reinstall simlab") from None


def load_demo_model(device: str = "cpu", dtype: str = "float32") -> tuple[Any, Any]:
    """The demo model, ready to run, and its tokenizer.

    Args:
        device: a torch device.
        dtype: name of a torch type. The weights are stored in float16; float32 computes with
            exactly these numbers.

    Returns:
        (Qwen3MoeForCausalLM in eval mode, PreTrainedTokenizerFast).

    Raises:
        SimlabError: torch or transformers is not installed, or the files are damaged.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as exc:
        raise SimlabError(
            f"simlab capture needs {exc.name or 'torch'}: pip install 'simlab[capture]'"
        ) from None
    folder = demo_folder()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as exc:  # whatever a damaged file makes the libraries raise
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise SimlabError(
            f"the demo model in {folder} cannot be loaded: {reason}; reinstall simlab"
        ) from exc
    return model.eval().to(device), tokenizer
