"""What the demo model is: bits per byte on held-out text, how its router behaves, what caches get.

    python scripts/demo_model/evaluate.py --corpus corpus.jsonl --write docs/demo-model.md \
        [--model run/model] [--real ../shared/traces]

Prints tables in Markdown; ``--write`` puts them between the two marks of a file. The traces are
made by running the model over held-out text as it stands (teacher-forced: nothing is sampled), with
a hook on each layer's experts; real traces are measured by the same code, beside it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from simlab.capture.demo import LABEL, demo_folder
from simlab.errors import SimlabError
from simlab.policy.registry import load_policy
from simlab.replay.grid import cells_for, replay_grid
from simlab.replay.run import Replayer
from simlab.replay.sizes import parse_sizes
from simlab.trace.arrow import Rows, trace_of
from simlab.trace.edit import slice_trace
from simlab.trace.importers import import_trace
from simlab.trace.importers.options import ImportOptions
from simlab.trace.read import read_trace
from simlab.trace.schema import DECODE, Trace, TraceMeta
from simlab.trace.stats import trace_stats
from simlab.trace.validate import check_trace

MARKS = ("<!-- figures -->", "<!-- end of figures -->")
WINDOW = 512
#: Bytes of each source that are measured, and windows of each kind that are traced.
MOST_BYTES, TRACED = 60_000, 16


def windows(tokenizer: Any, text: str) -> Iterator[list[int]]:
    """The text's tokens, WINDOW at a time."""
    ids = tokenizer(text, verbose=False).input_ids
    for at in range(0, len(ids), WINDOW):
        yield ids[at : at + WINDOW]


@torch.inference_mode()
def bits_per_byte(model: Any, tokenizer: Any, texts: Sequence[str]) -> float:
    """Mean over the bytes of texts; every window begins without context, after the end mark."""
    bits, size = 0.0, 0
    for text in texts:
        size += len(text.encode())
        for ids in windows(tokenizer, text):
            given = torch.tensor([[tokenizer.eos_token_id, *ids[:-1]]])
            logits = model(given, use_cache=False).logits[0].float()
            bits += F.cross_entropy(logits, torch.tensor(ids), reduction="sum").item() / math.log(2)
    return bits / size


@torch.inference_mode()
def teacher_forced(model: Any, windows: Sequence[list[int]], tag: str) -> Trace:
    """The picks of all tokens of the windows, a request each, all rows decode."""
    config = model.config
    seen: list[torch.Tensor] = []

    def note(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(args[1] if len(args) > 1 else named["top_k_index"])

    hooks = [
        layer.mlp.experts.register_forward_pre_hook(note, with_kwargs=True)
        for layer in model.model.layers
    ]
    made: list[np.ndarray[Any, Any]] = []
    for ids in windows:
        seen.clear()
        model(torch.tensor([ids]), use_cache=False)
        made.append(torch.stack(seen, 1).numpy().astype(np.uint16))
    for hook in hooks:
        hook.remove()
    layers = config.num_hidden_layers
    tokens = np.concatenate([np.arange(len(picks)) for picks in made])
    requests = np.repeat(np.arange(len(made)), [len(picks) for picks in made])
    picks = np.concatenate(made)
    rows = Rows(
        request=np.repeat(requests, layers).astype(np.int32),
        token=np.repeat(tokens, layers).astype(np.int32),
        phase=np.full(len(tokens) * layers, DECODE, np.uint8),
        layer=np.tile(np.arange(layers, dtype=np.int16), len(tokens)),
        lengths=np.full(len(tokens) * layers, picks.shape[2], np.uint16),
        experts=picks.reshape(-1),
        weights=None,
        step=None,
    )
    meta = TraceMeta(
        n_expert=config.num_experts,
        k=config.num_experts_per_tok,
        moe_layers=tuple(range(layers)),
        model=LABEL,
        kind="captured",
        tags={str(i): tag for i in range(len(made))},
    )
    trace = trace_of(rows, meta)
    check_trace(trace)
    return trace


def real_traces(folder: Path) -> Iterator[tuple[str, Trace]]:
    """Real models' picks: at most 40 requests of each."""
    named = (
        ("gpt-oss-20b, decode", "gptoss20b_decode_a.parquet", 32),
        ("DeepSeek-V2-Lite, prompts", "dsv2lite_a.parquet", 64),
        ("OLMoE-1B-7B, prompts", "olmoe.parquet", 64),
    )
    for name, file, experts in named:
        if (folder / file).is_file():
            trace = read_trace(folder / file, n_expert=experts)
            some = np.unique(trace.request)[:40].tolist()
            yield name, slice_trace(trace, requests=some)
    csv = folder / "bmoe" / "qwen.route.csv"
    if csv.is_file():
        yield "Qwen3-30B-A3B, k = 6, one turn", import_trace("bmoe", csv, ImportOptions())


def percent(value: float | None) -> str:
    """One decimal, or a dash."""
    return "–" if value is None else f"{100 * value:.1f}"


def router_table(traces: Sequence[tuple[str, Trace]]) -> list[str]:
    """Overlaps and coverage."""
    lines = [
        "| trace | layers × experts, k | tokens | overlap at 1 / 8 / 32 tokens | uniform"
        " | hottest 10 / 25 / 50 % hold | keys used |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, trace in traces:
        found = trace_stats(trace)
        share = {c.experts: c.share for c in found.coverage}
        held = [share[max(share, key=lambda n: -abs(n - part * trace.meta.n_expert))]
                for part in (0.1, 0.25, 0.5)]  # fmt: skip
        lines.append(
            f"| {name} | {len(trace.meta.moe_layers)} × {trace.meta.n_expert}, {found.k_max}"
            f" | {found.tokens:,} | {' / '.join(percent(o.share) for o in found.overlaps)}"
            f" | {percent(found.stickiness.uniform)} | {' / '.join(map(percent, held))}"
            f" | {percent(found.distinct_keys / found.keys)} |"
        )
    return lines


def cache_table(traces: Sequence[tuple[str, Trace]]) -> list[str]:
    """Hit rates of the cached path for LRU, LFU and OPT."""
    sizes = parse_sizes("10%,25%,50%")
    lines = [
        "| trace | C | LRU 10 / 25 / 50 % | LFU | OPT |",
        "|---|---|---|---|---|",
    ]
    policies = [load_policy(name) for name in ("lru", "lfu", "opt")]
    for name, trace in traces:
        replayer = Replayer(trace)
        cells = cells_for(replayer, policies, sizes=sizes, concurrency=(1, 4))
        rates = [percent(result.hit_rate) for result in replay_grid(replayer, cells)]
        for number, lanes in enumerate((1, 4)):
            if lanes > 1 and len(np.unique(trace.request)) < lanes:
                continue
            part = rates[9 * number : 9 * number + 9]
            cut = [" / ".join(part[at : at + 3]) for at in (0, 3, 6)]
            lines.append(f"| {name} | {lanes} | {' | '.join(cut)} |")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="default: the model in simlab")
    parser.add_argument("--real", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = options.model or demo_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts: dict[tuple[str, str], list[str]] = {}
    room: dict[tuple[str, str], int] = {}
    with options.corpus.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            key = (row["kind"], row["id"].split("/")[0])
            left = room.setdefault(key, MOST_BYTES)
            if row["heldout"] and left > 1000:
                # a part of each document rather than the first ones whole
                part = row["text"][: min(left, MOST_BYTES // 3)]
                room[key] -= len(part)
                texts.setdefault(key, []).append(part)
    lines = [
        f"Bits per byte of the {LABEL} on documents it was not trained on (windows of {WINDOW}"
        " tokens, each without what came before):",
        "",
        "| kind | source | documents | bytes | bits per byte |",
        "|---|---|---|---|---|",
    ]
    sums: dict[str, list[float]] = {}
    for (kind, source), found in sorted(texts.items()):
        size = sum(len(text.encode()) for text in found)
        bits = bits_per_byte(model, tokenizer, found)
        total = sums.setdefault(kind, [0.0, 0.0])
        total[0] += bits * size
        total[1] += size
        lines.append(f"| {kind} | {source} | {len(found)} | {size:,} | {bits:.3f} |")
    for kind, (bits, size) in sums.items():
        lines.append(f"| **{kind}** | all | | {int(size):,} | **{bits / size:.3f}** |")
    traces: list[tuple[str, Trace]] = []
    for kind in ("prose", "code", "mixed"):
        all_texts = [text for (k, _), found in texts.items() if k == kind for text in found]
        cut = [next(windows(tokenizer, text[at : at + 3000]))
               for at in range(0, MOST_BYTES // 3 - 3000, 3000)
               for text in all_texts if len(text) > at + 3000]  # fmt: skip
        traces.append((f"{LABEL}, {kind}", teacher_forced(model, cut[:TRACED], kind)))
    try:
        traces += real_traces(options.real)
    except SimlabError as exc:
        print(exc)
    lines += ["", f"Router of the {LABEL}, held-out text, and real traces (overlap: share of a"
              " token's picks that the token so many places earlier has too; in %):", "",
              *router_table(traces), "", "Hit rates in % (`--semantics llama.cpp`, cached path, one"
              " group of pools, no prefill; C = streams decoded together):", "",
              *cache_table(traces)]  # fmt: skip
    print("\n".join(lines))
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, rest = page.split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        body = "\n".join((before + MARKS[0], "", *lines, "", MARKS[1] + after))
        options.write.write_text(body, encoding="utf-8")


if __name__ == "__main__":
    main()
