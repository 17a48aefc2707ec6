"""A model by whatever names it: a GGUF file, a Hugging Face folder or config, a catalogue entry."""

from __future__ import annotations

from pathlib import Path

from simlab.errors import UsageError
from simlab.model.catalogue import find, named_shape
from simlab.model.shape import ModelShape


def read_model(text: str, *, dtype: str | None = None) -> ModelShape:
    """Read a model's shape.

    Args:
        text: a GGUF file, a folder with a config.json, a .json file, or a name of the catalogue.
        dtype: types of the expert matrices, for what is no GGUF file.

    Raises:
        UsageError: nothing is found under that name, or a figure is missing. SimlabError: a file is
            damaged.
    """
    path = Path(text)
    if path.suffix == ".gguf" or (path.is_file() and path.suffix != ".json"):
        if dtype is not None:
            raise UsageError("--dtype is for configs: a GGUF file says its types itself")
        from simlab.model.gguf_model import read_gguf

        return read_gguf(path)
    if path.is_dir() or path.suffix == ".json":
        if path.is_dir() and not (path / "config.json").exists():
            files = sorted(path.glob("*.gguf"))
            if files:
                raise UsageError(f"{path} has no config.json; name a file in it, as {files[0]}")
        from simlab.model.hf_config import read_config, shape_of_config

        name = path.parent.name if path.is_file() else path.resolve().name
        return shape_of_config(read_config(path), str(path), dtype=dtype, name=name)
    if find(text) is None and ("/" in text or "\\" in text) and not path.exists():
        raise UsageError(f"there is no file or folder {text}, and no such name in the catalogue")
    return named_shape(text, dtype=dtype)
