"""Tiny models of many architectures, and what their experts really did.

Used by test_capture_architectures.py and by scripts/architecture_table.py, which writes the table
of docs/capture-architectures.md. The truth about a pick is taken from the weights: where the
down-projection of one expert is scaled, exactly the rows that the expert worked on change.
"""

import importlib
import re
from dataclasses import dataclass, field, fields

#: set in every configuration that knows the name
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_k": 3,
    "moe_topk": 3,
    "top_k_experts": 3,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "decoder_sparse_step": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Case:
    """A model class by name, and what its configuration wants beyond TINY."""

    module: str
    model: str
    config: dict = field(default_factory=dict)
    drop: tuple = ()
    config_class: str = ""
    note: str = ""

    @property
    def name(self):
        return re.sub(r"(For(CausalLM|ConditionalGeneration)|Model)$", "", self.model)


_MLA = {"num_key_value_heads": 4}  # as many as heads: latent attention
_OCR = {**_MLA, "mlp_layer_types": ["dense", "sparse", "sparse"]}
_MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
_ERNIE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 8}

#: one line an architecture: the module's folder in transformers, the class, what it wants
CASES = [
    Case("afmoe", "AfmoeForCausalLM"),
    Case("aria", "AriaTextForCausalLM"),
    Case("axk1", "AXK1ForCausalLM", _MLA),
    Case("axk2", "AXK2ForCausalLM", _MLA),
    Case("bailing_hybrid", "BailingHybridForCausalLM"),
    Case("beam", "BeamForCausalLM", {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    Case("cohere2_moe", "Cohere2MoeForCausalLM"),
    Case(
        "dbrx",
        "DbrxForCausalLM",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
            "ffn_config": {
                "hidden_size": 32,
                "ffn_hidden_size": 16,
                "moe_num_experts": 8,
                "moe_top_k": 3,
            },
        },
    ),
    Case("deepseek_ocr2", "DeepseekOcr2TextModel", _OCR, config_class="DeepseekOcr2TextConfig"),
    Case("deepseek_v2", "DeepseekV2ForCausalLM", _MLA),
    Case("deepseek_v3", "DeepseekV3ForCausalLM", _MLA),
    Case("deepseek_v32", "DeepseekV32ForCausalLM", _MLA),
    Case(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
        note="arguments; layers that route by a hash of the token too",
    ),
    Case("dots1", "Dots1ForCausalLM"),
    Case("dots3_note", "Dots3NoteForCausalLM", {"num_key_value_heads": 4}),
    Case("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    Case(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeTextModel",
        {
            **_ERNIE,
            "moe_intermediate_size": [16, 16],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        note="arguments; the experts of images are left out",
    ),
    Case("exaone_moe", "ExaoneMoeForCausalLM"),
    Case("flex_olmo", "FlexOlmoForCausalLM"),
    Case("flint", "FlintForCausalLM"),
    Case(
        "gemma4",
        "Gemma4ForCausalLM",
        {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 16,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 96,
            "global_head_dim": 8,
            "num_kv_shared_layers": 0,
        },
    ),
    Case("glm4_moe", "Glm4MoeForCausalLM"),
    Case("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _MLA),
    Case(
        "glm4v_moe",
        "Glm4vMoeTextModel",
        {"rope_parameters": {**_MROPE["rope_parameters"], "partial_rotary_factor": 1.0}},
    ),
    Case("glm5_next", "Glm5NextTextModel", {**_OCR, "qk_rope_head_dim": 0}),
    Case("glm_moe_dsa", "GlmMoeDsaForCausalLM", _MLA),
    Case("gpt_oss", "GptOssForCausalLM"),
    Case("granitemoe", "GraniteMoeForCausalLM"),
    Case("granitemoe_swa", "GraniteMoeSWAForCausalLM"),
    Case("granitemoehybrid", "GraniteMoeHybridForCausalLM", _MAMBA),
    Case("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    Case("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    Case("hy_v3", "HYV3ForCausalLM"),
    Case("hy_v4", "HYV4ForCausalLM"),
    Case("hy_v4_vl", "HYV4VLTextModel", _MROPE),
    Case("inkling", "InklingForCausalLM"),
    Case("inkling2", "Inkling2ForCausalLM"),
    Case("jamba", "JambaForCausalLM"),
    Case("jetmoe", "JetMoeForCausalLM"),
    Case("kimi_linear", "KimiLinearForCausalLM"),
    Case("kolibri1", "Kolibri1ForCausalLM"),
    Case("laguna", "LagunaForCausalLM"),
    Case("lara_mini", "LaraMiniForCausalLM"),
    Case(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        {"layer_types": ["conv", "full_attention", "full_attention"]},
    ),
    Case("llama4", "Llama4ForCausalLM"),
    Case(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        {"zero_expert_num": 4, "num_key_value_heads": 4},
    ),
    Case("mellum", "MellumForCausalLM"),
    Case("mimo_v2_flash", "MiMoV2FlashForCausalLM"),
    Case("minimax", "MiniMaxForCausalLM"),
    Case("minimax_m2", "MiniMaxM2ForCausalLM"),
    Case("minimax_m3_vl", "MiniMaxM3VLForCausalLM"),
    Case("mistral4", "Mistral4ForCausalLM", _MLA, drop=("head_dim",)),
    Case("mistral_large4", "MistralLarge4TextModel", _MLA),
    Case("mixtral", "MixtralForCausalLM"),
    Case("muse_spark", "MuseSparkTextModel"),
    Case("nemotron_h", "NemotronHForCausalLM"),
    Case("olmoe", "OlmoeForCausalLM"),
    Case("openai_privacy_filter", "OpenAIPrivacyFilterModel"),
    Case("phimoe", "PhimoeForCausalLM"),
    Case("qwen2_moe", "Qwen2MoeForCausalLM"),
    Case("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    Case("qwen3_moe", "Qwen3MoeForCausalLM"),
    Case("qwen3_next", "Qwen3NextForCausalLM"),
    Case("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel"),
    Case("qwen3_vl_moe", "Qwen3VLMoeTextModel"),
    Case("qwen4_exp", "Qwen4ExpForCausalLM"),
    Case("solar_open", "SolarOpenForCausalLM"),
    Case("step3p7", "Step3p7TextModel", {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    Case(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_heads": 4,
            "expert_capacity": 3,
        },
    ),
    Case("unlimited_ocr", "UnlimitedOcrTextModel", _OCR),
    Case("zaya", "ZayaForCausalLM", {"num_experts_per_tok": 1}),
]


def build(case):
    """The tiny model, in eval mode, with every parameter random and none negligible."""
    import torch

    code = importlib.import_module(f"transformers.models.{case.module}.modeling_{case.module}")
    kind = getattr(code, case.model)
    config_class = kind.config_class
    if case.config_class:
        configs = importlib.import_module(
            f"transformers.models.{case.module}.configuration_{case.module}"
        )
        config_class = getattr(configs, case.config_class)
    # saved under other names in some configurations
    known = {f.name for f in fields(config_class)} | set(config_class().to_dict())
    tiny = {k: v for k, v in TINY.items() if k in known and k not in case.drop}
    config = config_class(**{**tiny, **case.config})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).eval().float()
    with torch.no_grad():
        for name, p in sorted([*model.named_parameters(), *model.named_buffers()]):
            if not p.is_floating_point() or "inv_freq" in name or "rotary" in name:
                continue
            if isinstance(p, torch.nn.Parameter) or "bias" in name:
                # the corrections that routers add to their scores count as much as the scores
                p.normal_(0.5 if p.dim() < 2 and "norm" in name else 0.0, 0.3)
        for name, table in model.named_buffers():
            if name.endswith("balancing_biases"):  # Zaya: some tokens shall skip all experts
                table.zero_()
                table[-1] = 0.8
            if name.endswith("tid2eid"):  # experts by token: a checkpoint's; zeros in a new model
                table.copy_(torch.rand(len(table), 8).argsort(1)[:, : table.shape[1]])
    return model


def scaled(site, model, expert):
    """Scale the down-projection of one expert in place; returns a function that undoes it."""
    module = site.module
    parent = model.get_submodule(site.path.rpartition(".")[0])
    kind = type(module).__name__
    if kind == "SwitchTransformersExperts":
        rows = module[f"expert_{expert}"].wo.weight
    elif kind == "JetMoeTopKGating":
        rows = parent.output_linear.weight[expert]
    elif kind == "Llama4Router":
        rows = parent.experts.down_proj[expert]
    elif kind == "DbrxExperts":
        rows = module.mlp.w2.view(module.num_experts, -1, module.hidden_size)[expert]
    else:
        rows = module.down_proj[expert]
    before = rows.data.clone()
    rows.data.mul_(1.5)
    return lambda: rows.data.copy_(before)


def first_tensor(value):
    return value if hasattr(value, "shape") else first_tensor(value[0])


def compare(model):
    """Captured picks beside the experts that executed, for every site of a model.

    Returns:
        (sites, picks checked, picks that agree): a pick is a (row, expert) that was captured or
        executed; it agrees if it was both.
    """
    import torch

    from simlab.capture.hooks import attach

    torch.manual_seed(1)
    inputs = {"input_ids": torch.randint(3, 96, (2, 12)), "use_cache": False}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(3, 96, (2, 12))
    checked = agreed = 0
    with attach(model, weights=True) as tap, torch.no_grad():
        calls, blocks, handles = {}, {}, []
        for site in tap.sites:
            block = model.get_submodule(site.path.rpartition(".")[0])
            blocks[site.path] = block

            def keep(_module, args, kwargs, path=site.path):
                calls[path] = (clone(args), clone(kwargs))

            handles.append(block.register_forward_pre_hook(keep, with_kwargs=True))
        model(**inputs)
        picks = tap.take()
        for handle in handles:
            handle.remove()
    captured = picks.experts()
    assert picks.router_weights().shape == captured.shape
    with torch.no_grad():
        for i, site in enumerate(tap.sites):
            args, kwargs = calls[site.path]
            run = blocks[site.path]

            def output(run=run, args=args, kwargs=kwargs):
                out = first_tensor(run(*clone(args), **clone(kwargs)))
                return out.reshape(len(captured), -1).clone()

            base = output()
            assert torch.equal(base, output()), "the block does not repeat itself"
            for expert in range(site.n_expert):
                undo = scaled(site, model, expert)
                ran = (output() != base).any(1).numpy()
                undo()
                said = (captured[:, i] == expert).any(1)
                checked += int((ran | said).sum())
                agreed += int((ran & said).sum())
    return tap.sites, checked, agreed


def clone(value):
    """A copy of the arguments of a call; what is no tensor is shared."""
    if hasattr(value, "clone"):
        return value.clone()
    if isinstance(value, dict):
        return {k: clone(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(clone(v) for v in value)
    return value
