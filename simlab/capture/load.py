"""Getting a model to run: the demo model, a folder, or a Hugging Face id."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simlab.capture.demo import LABEL, load_demo_model
from simlab.capture.need import need_torch
from simlab.capture.sampling import Sampling
from simlab.capture.sites import find_sites
from simlab.errors import SimlabError, UsageError

if TYPE_CHECKING:
    import torch

#: The name of the model that comes with simlab.
DEMO = "demo"
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
#: Lanes that the demo model decodes on unless told otherwise.
DEMO_LANES = 8
#: The demo model repeats itself when it is greedy; these keep it going.
_DEMO_SAMPLING = Sampling(temperature=0.8, top_p=0.95)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to run.

    Attributes:
        name: what it is called in metadata. device: "cpu" or "cuda".
        sampling: what the model's own settings say about choosing tokens.
        eos: ids that end a request.
        context: most tokens of a request, or None when the model does not say.
        threads: CPU threads to run it on, or None for as many as torch takes. The demo model gets
            one: its products are too small to share, threads that wait for each other cost it much
            on a busy machine, and so its text does not depend on the number of cores.
    """

    model: torch.nn.Module
    tokenizer: Any
    name: str
    device: str
    sampling: Sampling
    eos: tuple[int, ...]
    context: int | None
    threads: int | None = None

    @property
    def dtype(self) -> str:
        """Type of the weights, such as float32."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def device_name(self) -> str:
        """The device, in words."""
        import platform

        import torch

        if self.device == "cuda":
            return f"cuda ({torch.cuda.get_device_name()})"
        threads = self.threads or torch.get_num_threads()
        return f"cpu ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"


def pick_device(device: str) -> str:
    """``auto`` decided: "cuda" where there is one, else "cpu".

    Raises:
        UsageError: torch is not installed, or there is no CUDA device although one is wanted.
    """
    need_torch()
    import torch

    if device not in DEVICES:
        raise UsageError(f"--device must be one of {', '.join(DEVICES)}, not {device!r}")
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        why = (
            f"this torch ({torch.__version__}) is built without CUDA"
            if torch.version.cuda is None
            else "torch sees no CUDA device here"
        )
        raise UsageError(f"--device cuda: {why}; use --device cpu")
    return ("cuda" if there else "cpu") if device == "auto" else device


def load(
    name: str = DEMO,
    *,
    device: str = "auto",
    dtype: str = "auto",
    download: bool = False,
    hook: str | None = None,
) -> Loaded:
    """Load a model and its tokenizer.

    Args:
        name: "demo", a folder, or a Hugging Face id such as ``org/model``.
        device: auto, cpu or cuda.
        dtype: type of the weights; auto is the checkpoint's, and float32 for the demo model.
        download: ask the Hugging Face hub for what is not on this machine.
        hook: where the experts are, see `simlab.capture.hooks.attach`.

    Raises:
        UsageError: no such folder, device or type, or a package is missing.
        SimlabError: the files are damaged or of an unknown architecture, the model is no MoE, or
            there is not enough memory.
    """
    where = pick_device(device)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    try:
        import transformers
    except ImportError:
        raise UsageError(
            "simlab capture needs transformers: pip install 'simlab[capture]'"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        if name == DEMO:
            model, tokenizer = load_demo_model(where, "float32" if dtype == "auto" else dtype)
            loaded = _loaded(model, tokenizer, LABEL, where, _DEMO_SAMPLING)
            return replace(loaded, threads=1)
        model, tokenizer = _from_files(name, dtype, download, hook)
        return _loaded(model.eval().to(where), tokenizer, name, where, None)
    except Exception as exc:
        if out_of_memory(exc):
            raise SimlabError(
                f"out of memory while loading {name} on {where}: use a smaller --dtype (bfloat16)"
                " or model, or another --device"
            ) from exc
        raise


def _loaded(model: Any, tokenizer: Any, name: str, device: str, own: Sampling | None) -> Loaded:
    if model.config.is_encoder_decoder:
        raise SimlabError(
            f"{name} has an encoder and a decoder; simlab capture runs decoder-only models (in your"
            " own program: with simlab.capture.tracing(model))"
        )
    settings: Any = getattr(model, "generation_config", None)
    eos = getattr(settings, "eos_token_id", None)
    if eos is None:
        eos = tokenizer.eos_token_id
    ends = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    if own is None:
        own = Sampling()
        if getattr(settings, "do_sample", False):
            own = Sampling(
                temperature=float(settings.temperature or 1.0),
                top_k=int(settings.top_k or 0),
                top_p=float(settings.top_p or 1.0),
            )
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Loaded(model, tokenizer, name, device, own, ends, context)


def _from_files(name: str, dtype: str, download: bool, hook: str | None) -> tuple[Any, Any]:
    """Model and tokenizer of a folder or a Hugging Face id."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        source = str(folder)
    elif folder.exists():
        raise UsageError(f"--model {name} is a file; name the folder that holds the model")
    elif name.startswith((".", "/", "~", "\\")) or name.count("/") != 1 or not all(name.split("/")):
        raise UsageError(f"--model {name}: there is no such folder (or: demo, or org/model)")
    else:
        source = name
    common: dict[str, Any] = {"local_files_only": not download, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(source, **common)
        _check_moe(config, hook)
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=kind, **common)
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
    except SimlabError:
        raise
    except Exception as exc:  # the libraries raise many kinds
        if out_of_memory(exc):
            raise
        raise _explain(name, folder.is_dir(), download, exc) from exc
    return model, tokenizer


def _check_folder(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise SimlabError(
            f"{folder} is no Hugging Face model folder: it has no config.json (GGUF files are"
            " not run by torch)"
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise SimlabError(f"{config} cannot be read ({exc}): get the model again") from None


def _check_moe(config: Any, hook: str | None) -> None:
    """Fail before gigabytes are read: look at the model without its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(config)
    except Exception:  # loading tells better what is wrong
        return
    find_sites(shape, hook)


def _explain(name: str, local: bool, download: bool, exc: Exception) -> SimlabError:
    text = " ".join(str(exc).split())
    if "trust_remote_code" in text:
        return SimlabError(
            f"{name} is an architecture that needs code from the model's own files, which simlab"
            " does not run; load it yourself and use simlab.capture.tracing(model)"
        )
    if (
        "does not recognize this architecture" in text
        or "Unrecognized model" in text
        or "Unrecognized configuration class" in text
    ):
        import transformers

        return SimlabError(
            f"{name} is of an architecture that transformers {transformers.__version__} does not"
            " run as a language model: update transformers, or choose another model"
        )
    if not local and not download:
        return UsageError(
            f"--model {name} is not on this machine: name its folder, or add --download to get it"
            " from the Hugging Face hub"
        )
    if not local and isinstance(exc, OSError):
        return SimlabError(
            f"cannot download {name}: check the name and the network, or copy the model here and"
            f" name its folder ({text[:160]})"
        )
    return SimlabError(f"{name} cannot be loaded: {text[:240] or type(exc).__name__}")


def out_of_memory(exc: BaseException) -> bool:
    """Whether an exception says that memory ran out, on whatever device."""
    text = str(exc)
    return (
        isinstance(exc, MemoryError)
        or type(exc).__name__ == "OutOfMemoryError"
        or "out of memory" in text
        or "can't allocate memory" in text
        or "not enough memory" in text
    )
