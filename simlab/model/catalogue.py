"""The models that simlab knows by name: one TOML file each in ``catalogue/``, with its sources.

A figure that no source states is absent from the file, and asking for what needs it says so.
"""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from simlab.errors import UsageError
from simlab.model.hf_config import shape_from
from simlab.model.shape import ModelShape

FOLDER = Path(__file__).with_name("catalogue")


@cache
def entries() -> dict[str, dict[str, Any]]:
    """Name -> the figures of its file, sorted by name."""
    found = {}
    for path in FOLDER.glob("*.toml"):
        entry = tomllib.loads(path.read_text(encoding="utf-8"))
        found[str(entry["name"])] = entry
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def find(name: str) -> dict[str, Any] | None:
    """The entry of a name or alias, in any case; ``Qwen/Qwen3-30B-A3B`` is found too."""
    wanted = _plain(name.rpartition("/")[2])
    for known, entry in entries().items():
        if wanted in {_plain(each) for each in (known, *entry.get("aliases", ()))}:
            return entry
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def named_shape(name: str, *, dtype: str | None = None) -> ModelShape:
    """The shape of a model of the catalogue.

    Args:
        dtype: types of the expert matrices, in place of the entry's own (see hf_config).

    Raises:
        UsageError: there is no such entry, or it lacks a figure; names the figures.
    """
    entry = find(name)
    if entry is None:
        near = get_close_matches(name, entries(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(entries())}"
        raise UsageError(
            f"{name!r} is no GGUF file, no folder with a config.json, and not in the catalogue;"
            f" {hint}"
        )
    layers = entry.get("moe_layers")
    return shape_from(
        name=str(entry["name"]),
        source=f"catalogue: {entry['name']}",
        n_layers=entry.get("layers"),
        layers=None if layers is None else parse_spans(str(layers)),
        n_expert=entry.get("n_expert"),
        k=entry.get("k"),
        hidden=entry.get("hidden"),
        inter=entry.get("inter"),
        gated=bool(entry.get("gated", True)),
        dtype=dtype if dtype is not None else entry.get("dtype"),
    )


def parse_spans(text: str) -> list[int]:
    """Layer numbers from ``0-5,8,11``.

    Raises:
        UsageError: it is something else.
    """
    layers: set[int] = set()
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        if not span or int(span[1]) > int(span[2] or span[1]):
            raise UsageError(f"layers are given as 0-19,40 (counted from 0), not {text!r}")
        layers.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return sorted(layers)
