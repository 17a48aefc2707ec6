"""What ``simlab advise`` prints: the figures, what they rest on, and the lines to type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from simlab.analysis.advise import Adviser, Choice

_GIB = 2**30
#: The first build with the cache on several devices (article 002).
_BUILD = "b11712"
_SWITCHED_OFF = (
    f"needs build {_BUILD} or newer; a cache refuses to start with tensor parallel, switches"
    " pipeline parallelism off, and output is not bit-identical to a run without it"
)

Contexts = Sequence[tuple[int, "Choice | None"]]


def llama_cpp_line(adviser: Adviser, choice: Choice) -> str:
    """The llama.cpp command of a choice."""
    source = adviser.shape.source
    words = ["llama-server", "-m", source if source.endswith(".gguf") else "MODEL.gguf"]
    hosted = len(adviser.layers) - choice.resident
    if not choice.resident:
        words.append("-cmoe")
    elif hosted:
        # the option counts the model's layers from the first one, dense ones included
        words += ["--n-cpu-moe", str(adviser.layers[hosted - 1] + 1)]
    if choice.mib:
        words += ["--moe-cache-mib", f"{choice.mib:.0f}"]
    total = adviser.context * adviser.streams
    return shlex.join([*words, "-c", str(total), "-np", str(adviser.streams), "-lv", "4"])


def sglang_line(adviser: Adviser, choice: Choice) -> str | None:
    """The SGLang command that keeps as many experts a layer resident; None without a cache."""
    if not choice.mib or choice.resident:
        return None
    each = min(
        adviser.shape.n_expert, max(adviser.shape.k, sum(choice.slots) // len(adviser.layers))
    )
    model = shlex.quote(adviser.shape.name)
    return (
        f"python -m sglang.launch_server --model-path {model} --enable-paged-experts"
        f" --paged-experts-num-resident {each} --max-running-requests {adviser.streams}"
    )


def _notes(adviser: Adviser, choices: Sequence[Choice]) -> list[str]:
    best, machine = choices[0], adviser.machine
    notes = list(best.warnings)
    if machine.ram is not None and best.host > machine.ram:
        notes.append(
            f"{best.host / _GIB:.1f} GiB of experts and embeddings do not fit the"
            f" {machine.ram / _GIB:.1f} GiB of host memory: they would be read from disk"
        )
    cached = [c for c in choices if c.mib]
    if cached and not best.mib:
        c = cached[0]
        notes.append(
            f"a cache does not pay here: it hits {_share(c.hit_rate)}, break-even with the CPU is"
            f" {_share(c.break_even)}"
        )
    elif best.break_even is not None and best.hit_rate is not None:
        even = best.break_even
        notes.append(
            "break-even with the CPU computing those experts: "
            + ("any hit rate" if even <= 0 else f"{even:.1%} hits")
            + f"; predicted {best.hit_rate:.1%}"
        )
    if adviser.trace.meta.kind == "synthetic":
        notes.append("the trace is SYNTHETIC: capture one from your model, on your text")
    if adviser.policy.declines or adviser.policy.name != "lru":
        notes.append(f"policy {adviser.policy.label} needs another engine: llama.cpp has lru")
    return notes


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def advice_dict(
    adviser: Adviser,
    choices: Sequence[Choice],
    worth: Mapping[str, float | None],
    contexts: Contexts,
) -> dict[str, Any]:
    """JSON-ready; every figure is predicted."""
    return {
        "kind": "predicted",
        "model": adviser.shape.name,
        "trace": adviser.trace_name,
        "synthetic": adviser.trace.meta.kind == "synthetic",
        "policy": adviser.policy.label,
        "machine": asdict(adviser.machine),
        "streams": adviser.streams,
        "context": adviser.context,
        "kv_bytes_per_token": adviser.kv_token,
        "base_ms": adviser.base_ms,
        "choices": [asdict(choice) for choice in choices],
        "ms_per_gib": dict(worth),
        "contexts": [
            {"context": n, **(asdict(c) if c is not None else {"fits": False})} for n, c in contexts
        ],
        "notes": _notes(adviser, choices),
        "llama_cpp": llama_cpp_line(adviser, choices[0]),
        "sglang": sglang_line(adviser, choices[0]),
    }


def advice_lines(
    adviser: Adviser,
    choices: Sequence[Choice],
    worth: Mapping[str, float | None],
    contexts: Contexts,
) -> Iterator[str]:
    """The text, line by line."""
    machine, best = adviser.machine, choices[0]
    yield click.style(f"{adviser.shape.name}  ({adviser.shape.source})", bold=True)
    streams = f"{adviser.streams} stream{'' if adviser.streams == 1 else 's'}"
    yield f"PREDICTED from {adviser.trace_name}, {streams} of {adviser.context:,} tokens"
    yield f"  link      {machine.link.gb_s:6.1f} GB/s  {machine.link.source}"
    yield f"  device    {machine.device.gb_s:6.1f} GB/s  {machine.device.source}"
    yield f"  CPU       {machine.cpu.gb_s:6.1f} GB/s  {machine.cpu.source}"
    how = "as given" if machine.step_ms is not None else "from the device's rate"
    yield f"  step      {adviser.base_ms:6.2f} ms    without any miss, {how}"
    yield "\ndevice memory"
    for name, size in (
        ("weights beside the experts", adviser.other),
        (f"KV cache ({adviser.kv_token / 1024:.0f} KiB a token)", adviser.kv()),
        ("reserve", machine.reserve),
        ("left for experts", adviser.room(0)),
    ):
        yield f"  {name:<34} {size / _GIB:7.2f} GiB"
    yield "\nplacements, best predicted decode first"
    yield "  whole layers  cache MiB  slots          hits  MiB/token  ms/step  tok/s"
    pinned = [c for c in choices if c.pinned]
    for c in [*[c for c in choices if not c.pinned][:8], *pinned]:
        slots = ";".join(f"{n}" for n in c.slots) or "-"
        yield (
            f"  {c.resident:>12}  {c.mib:>9,.0f}  {slots:<12} {_share(c.hit_rate):>6}"
            f"  {c.mib_per_token:>9,.1f}  {c.decode_ms:>7.2f}  {c.tok_s:>5.1f}"
            + ("" if c.mib or c.resident == len(adviser.layers) else "  CPU computes the rest")
            + (f"  {c.pinned} experts a layer pinned" if c.pinned else "")
        )
    if pinned:
        yield "pinned: the most picked experts of this trace, in hindsight; needs an engine change"
    if best.prefill_ms is not None:
        yield (
            f"prefill: transfers alone take {best.prefill_ms:.2f} ms a prompt token in full batches"
            " of 512 (compute is not modelled)"
        )
    yield "\none more GiB of device memory is worth"
    for use, ms in worth.items():
        if ms is None:
            continue
        if use == "context":
            tokens = int(_GIB / max(1, adviser.kv_token * adviser.streams))
            use += f" ({tokens:,} tokens a stream), taken from the cache"
        yield f"  {-ms:+7.3f} ms a step  spent on {use}"
    yield "\ncache against context (same whole layers)"
    top = max((c.tok_s for _, c in contexts if c is not None), default=1.0)
    for n, choice in contexts:
        if choice is None:
            yield f"  {n:>9,}  does not fit"
            continue
        yield (
            f"  {n:>9,}  {choice.mib:>8,.0f} MiB  {_share(choice.hit_rate):>6}"
            f"  {choice.tok_s:>6.1f} {'#' * round(30 * choice.tok_s / top)}"
        )
    yield ""
    for note in _notes(adviser, choices):
        yield f"note: {note}"
    yield f"\nllama.cpp:  {llama_cpp_line(adviser, best)}"
    if best.mib:
        yield f"            {_SWITCHED_OFF}"
    line = sglang_line(adviser, best)
    if line is not None:
        yield f"SGLang:     {line}"
        yield "            (per layer, not one pool: its hits were not replayed)"
