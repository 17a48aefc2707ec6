"""Tiny random models for tests of capturing; never a stand-in for a trained one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from simlab.capture.engine import Engine, Request, Settings, StepRows
from simlab.capture.hooks import attach
from simlab.capture.load import Loaded
from simlab.capture.sampling import Sampling

VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}


def build(name: str) -> Any:
    """A model of random weights in float64: products of batches then pick the same experts."""
    import torch
    import transformers as tf

    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    locals_ = {"num_local_experts": 8, "num_experts_per_tok": 2}
    if name == "full":  # full attention
        config = tf.Qwen3MoeConfig(**_COMMON, **experts, head_dim=8, moe_intermediate_size=16)
    elif name == "sliding":  # a window shorter than the prompts, alternating with full attention
        config = tf.GptOssConfig(**_COMMON, **locals_, head_dim=8, sliding_window=6)
    elif name == "mla":  # keys and values of different widths, a dense first layer
        config = tf.DeepseekV3Config(
            **{**_COMMON, "num_key_value_heads": 4}, n_routed_experts=8, num_experts_per_tok=2,
            n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1,
            kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=12,
            n_shared_experts=1,
        )  # fmt: skip
    elif name == "recurrent":  # gated delta rule: a running state and a convolution
        config = tf.Qwen3NextConfig(
            **{**_COMMON, "num_hidden_layers": 4}, **experts, head_dim=8, moe_intermediate_size=16,
            shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8,
        )  # fmt: skip
    else:
        raise ValueError(name)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    for module in model.modules():  # random models hardly tell tokens apart: sharpen the routers
        if type(module).__name__.endswith(("Router", "TopkRouter")):
            module.weight.data *= 40
    model.set_experts_implementation("eager")  # the others know no float64
    return model.double()


class Words:
    """A tokenizer of numbers: "5 17 3" is three tokens."""

    eos_token_id = 1
    chat_template = None

    def __call__(self, text: str, **_options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) % VOCABULARY for word in text.split()]}

    def __len__(self) -> int:
        return VOCABULARY


def loaded(model: Any, eos: tuple[int, ...] = (1,)) -> Loaded:
    return Loaded(model, Words(), "tiny random model", "cpu", Sampling(), eos, 256)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, size=n).tolist() for n in lengths]


def engine_run(
    model: Any, texts: list[list[int]], settings: Settings, eos: tuple[int, ...] = ()
) -> tuple[dict[int, Request], list[StepRows]]:
    """Requests as they ended, and the rows of every step."""
    ended: dict[int, Request] = {}
    steps: list[StepRows] = []

    def done(request: Request) -> None:
        assert request.index not in ended
        ended[request.index] = request

    with attach(model, weights=True) as tap:
        engine = Engine(model, tap, settings, eos=eos, emit=steps.append, done=done)
        assert engine.run(enumerate(texts))
    return ended, steps


def table(steps: list[StepRows]) -> dict[tuple[int, int], tuple[int, list[list[int]]]]:
    """(request, token) -> (phase, picks of every layer); no token may come twice."""
    found: dict[tuple[int, int], tuple[int, list[list[int]]]] = {}
    for rows in steps:
        for i in range(len(rows.token)):
            place = (int(rows.request[i]), int(rows.token[i]))
            assert place not in found
            found[place] = (int(rows.phase[i]), rows.experts[i].tolist())
    return found


def save_model(folder: Path) -> Path:
    """A model's folder with weights (float32) and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{letter: i + 1 for i, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        **{**_COMMON, "vocab_size": len(vocabulary), "max_position_embeddings": 4096},
        num_experts=16, num_experts_per_tok=4, head_dim=8, moe_intermediate_size=16,
    )  # fmt: skip
    config.eos_token_id = None
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
