"""Train the demo model on the corpus, for a given time, and write it as transformers loads it.

    python scripts/demo_model/train.py --corpus corpus.jsonl --out run --minutes 60 --threads 2

Writes run/tokenizer.json and run/tokens.npz (made first, if not there), run/loss.csv, and
run/model/ with a checkpoint in transformers' layout, replaced every five minutes and at the end.
The learning rate follows the clock: warm-up, a plateau, a cosine to nearly zero at the end of the
time. Another number in run/minutes, read every step, changes the time while it runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from model import CONFIG, DemoModel, state_for_transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

#: Share of the training sequences that come from each source.
MIXTURE = {
    "austen": 0.2,
    "web": 0.1,
    "henry": 0.06,
    "spurgeon": 0.12,
    "bierce": 0.02,
    "python": 0.37,
    "pydoc": 0.13,
}
END, PAD = "<|end|>", "<|pad|>"
CHECKPOINT_S = 300
#: The clock's share after which sequences are twice as long, and from which the rate falls.
LONG_FROM, FALL_FROM = 0.7, 0.4


def read_corpus(path: Path) -> Iterator[dict[str, Any]]:
    """The documents, one at a time."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def make_tokenizer(corpus: Path, vocabulary: int) -> Tokenizer:
    """A byte-level BPE; trained on every fourth training document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        row["text"] for i, row in enumerate(read_corpus(corpus)) if not row["heldout"] and not i % 4
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(corpus: Path, tokenizer: Tokenizer) -> dict[str, npt.NDArray[np.uint16]]:
    """Training tokens of each source, documents joined by END."""
    parts: dict[str, list[npt.NDArray[np.uint16]]] = {}
    for row in read_corpus(corpus):
        if not row["heldout"]:
            ids = [tokenizer.token_to_id(END), *tokenizer.encode(row["text"]).ids]
            parts.setdefault(row["id"].split("/")[0], []).append(np.array(ids, np.uint16))
    return {source: np.concatenate(found) for source, found in parts.items()}


def save_model(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights (float16), configuration and tokenizer; each file is replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    half = state_for_transformers(model, torch.float16)
    save_file(half, folder / "model.tmp", metadata={"format": "pt"})
    os.replace(folder / "model.tmp", folder / "model.safetensors")
    config = {**CONFIG, "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, "pad_token_id": 1}, indent=2) + "\n"
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 4096,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def rate_at(clock: float, step: int, warmup: int) -> float:
    """Learning rate as a share of its peak; ``clock`` is the share of the time that is gone."""
    fall = min(max((clock - FALL_FROM) / (1 - FALL_FROM), 0.0), 1.0)
    return min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * (1 + math.cos(math.pi * fall)) / 2)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=6, help="sequences of --length tokens a step")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    stored = out / "tokenizer.json"
    if not stored.exists():
        make_tokenizer(options.corpus, CONFIG["vocab_size"]).save(str(stored))
    tokenizer = Tokenizer.from_file(str(stored))
    encoded = out / "tokens.npz"
    if not encoded.exists():
        np.savez(encoded, **encode(options.corpus, tokenizer))
    data = dict(np.load(encoded))
    print({source: len(ids) for source, ids in data.items()}, flush=True)

    model = DemoModel(seed=options.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1 and p is not model.embed]
    others = [p for p in model.parameters() if p.ndim < 2 or p is model.embed]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    random = np.random.default_rng(options.seed)
    sources = [source for source in MIXTURE if source in data]
    shares = np.array([MIXTURE[source] for source in sources])
    control = out / "minutes"
    control.write_text(str(options.minutes))
    started = saved = time.monotonic()
    step = tokens = 0
    mean = dict.fromkeys(("prose", "code", "mixed"), math.nan)
    kinds = {"python": "code", "pydoc": "mixed"}
    with (out / "loss.csv").open("w", newline="") as file:
        log = csv.writer(file, lineterminator="\n")
        log.writerow(["step", "tokens", "seconds", "rate", "loss", "balance", *mean])
        while True:
            clock = (time.monotonic() - started) / 60 / float(control.read_text() or 0)
            if clock >= 1:
                break
            long = 2 if clock >= LONG_FROM else 1
            length, batch = options.length * long, options.batch // long
            chosen = random.choice(len(sources), size=batch, p=shares / shares.sum())
            rows = []
            for which in chosen:
                ids = data[sources[which]]
                at = random.integers(len(ids) - length - 1)
                rows.append(ids[at : at + length + 1].astype(np.int64))
            block = torch.from_numpy(np.stack(rows))
            scale = rate_at(clock, step, 60)
            for group in optimizer.param_groups:
                group["lr"] = options.rate * scale
            logits, balance, _ = model(block[:, :-1])
            target = block[:, 1:]
            each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
            loss = each.mean()
            (loss + CONFIG["router_aux_loss_coef"] * balance).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            tokens += block.shape[0] * length
            for which, value in zip(chosen, each.detach().view(batch, -1).mean(1), strict=True):
                kind = kinds.get(sources[which], "prose")
                old = mean[kind]
                mean[kind] = value.item() if math.isnan(old) else 0.98 * old + 0.02 * value.item()
            now = time.monotonic()
            if step % 20 == 0:
                figures = (loss.item(), balance.item(), *mean.values())
                row = [f"{value:.4f}" for value in figures]
                log.writerow([step, tokens, f"{now - started:.0f}", f"{scale:.3f}", *row])
                file.flush()
            if now - saved > CHECKPOINT_S:
                saved = now
                save_model(model, tokenizer, out / "model")
    save_model(model, tokenizer, out / "model")
    print(f"{step} steps, {tokens:,} tokens, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
