"""The demo model as it is trained: Qwen3-MoE's arithmetic, with experts that a CPU computes fast.

The experts are so small (three matrices of 8 x 128) that a call of a library per expert costs more
than its work, so the mixture is one compiled loop over the picks, sorted by expert, forward and
backward. `state_for_transformers` names the weights as Qwen3MoeForCausalLM's checkpoints do.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: The shape, in the words of transformers' Qwen3MoeConfig: 12 x 128 = 1,536 keys, 8 picks a layer,
#: which is Qwen3-30B-A3B's share of picked experts (8 of 128).
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "router_aux_loss_coef": 0.003,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "initializer_range": 0.02,
    "use_cache": True,
}


@numba.njit(fastmath=True, parallel=True, nogil=True)
def _forward(x, token, weight, start, gate_up, down, pre, out):
    """Sum of the weighted experts; ``pre`` keeps what came before the activation for _backward.

    x [N, d]; token, weight [P] sorted by expert; start [E + 1]; gate_up [E, 2f, d]; down [E, f, d];
    pre [P, 2f]; out [threads, N, d], one each so that two threads never add to the same place.
    """
    threads, width, inner = out.shape[0], x.shape[1], down.shape[1]
    experts = len(start) - 1
    for part in numba.prange(threads):
        for e in range(experts * part // threads, experts * (part + 1) // threads):
            for p in range(start[e], start[e + 1]):
                row = x[token[p]]
                target = out[part, token[p]]
                for j in range(2 * inner):
                    matrix = gate_up[e, j]
                    total = np.float32(0)
                    for c in range(width):
                        total += matrix[c] * row[c]
                    pre[p, j] = total
                for j in range(inner):
                    gate = pre[p, j]
                    h = weight[p] * gate / (np.float32(1) + np.exp(-gate)) * pre[p, inner + j]
                    matrix = down[e, j]
                    for c in range(width):
                        target[c] += h * matrix[c]


@numba.njit(fastmath=True, parallel=True, nogil=True)
def _backward(x, token, weight, start, gate_up, down, pre, grad, gx, g_gate_up, g_down, g_weight):
    """Gradients of everything; gx [threads, N, d] as ``out`` above."""
    threads, width, inner = gx.shape[0], x.shape[1], down.shape[1]
    experts = len(start) - 1
    one = np.float32(1)
    for part in numba.prange(threads):
        slope = np.empty(2 * inner, np.float32)
        for e in range(experts * part // threads, experts * (part + 1) // threads):
            for p in range(start[e], start[e + 1]):
                row = x[token[p]]
                g = grad[token[p]]
                target = gx[part, token[p]]
                by_weight = np.float32(0)
                for j in range(inner):
                    matrix = down[e, j]
                    q = np.float32(0)
                    for c in range(width):
                        q += matrix[c] * g[c]
                    gate, up = pre[p, j], pre[p, inner + j]
                    sigmoid = one / (one + np.exp(-gate))
                    h = gate * sigmoid * up
                    by_weight += h * q
                    q *= weight[p]
                    slope[j] = q * up * sigmoid * (one + gate * (one - sigmoid))
                    slope[inner + j] = q * gate * sigmoid
                    h *= weight[p]
                    matrix_grad = g_down[e, j]
                    for c in range(width):
                        matrix_grad[c] += h * g[c]
                g_weight[p] = by_weight
                for j in range(2 * inner):
                    s = slope[j]
                    matrix = gate_up[e, j]
                    matrix_grad = g_gate_up[e, j]
                    for c in range(width):
                        target[c] += s * matrix[c]
                        matrix_grad[c] += s * row[c]


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        count = torch.bincount(flat, minlength=len(down))
        start = torch.cat([count.new_zeros(1), count.cumsum(0)])
        sizes = (torch.get_num_threads(), *x.shape)
        pre = x.new_empty(len(flat), gate_up.shape[1])
        out = x.new_zeros(sizes)
        saved = (x, order // ids.shape[1], weights.flatten()[order], start, gate_up, down, pre)
        _forward(*(part.detach().numpy() for part in saved), out.numpy())
        ctx.save_for_backward(*saved, order)
        return out.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, order = ctx.saved_tensors
        x, gate_up, down = saved[0], saved[4], saved[5]
        gx = x.new_zeros((torch.get_num_threads(), *x.shape))
        made = (gx, torch.zeros_like(gate_up), torch.zeros_like(down), x.new_empty(len(order)))
        arrays = (part.detach().numpy() for part in (*saved, grad.contiguous(), *made))
        _backward(*arrays)
        g_weight = torch.empty_like(made[3])
        g_weight[order] = made[3]
        return gx.sum(0), None, g_weight.view(len(x), -1), made[1], made[2]


class Layer(nn.Module):
    """Attention and mixture of one layer; the parameters are plain tensors."""

    def __init__(self, config: dict[str, Any], generator: torch.Generator) -> None:
        super().__init__()
        d, f = config["hidden_size"], config["moe_intermediate_size"]
        e, size = config["num_experts"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.size, self.k, self.eps = size, config["num_experts_per_tok"], config["rms_norm_eps"]

        def draw(*shape: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * std)

        self.norm1, self.norm2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))
        self.q = draw(self.heads * size, d, std=d**-0.5)
        self.kv = draw(2 * self.kv_heads * size, d, std=d**-0.5)
        # what adds to the stream begins at nearly nothing: noise would drown the small embeddings
        self.o = draw(d, self.heads * size, std=0.002)
        self.router = draw(e, d, std=0.5 * d**-0.5)
        self.gate_up = draw(e, 2 * f, d, std=d**-0.5)
        # transposed: [expert, inner, hidden] lets the loops run along the hidden axis
        self.down = draw(e, f, d, std=0.01)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, time, d] -> (x, balance loss (1 = even), expert ids [batch * time, k])."""
        batch, time, d = x.shape
        h = F.rms_norm(x, (d,), self.norm1, self.eps)
        q = F.linear(h, self.q).view(batch, time, self.heads, self.size)
        kv = F.linear(h, self.kv).view(batch, time, 2 * self.kv_heads, self.size)
        key, value = kv.transpose(1, 2).chunk(2, 1)
        q = _rotate(F.rms_norm(q, (self.size,), self.q_norm, self.eps).transpose(1, 2), cos, sin)
        key = _rotate(F.rms_norm(key, (self.size,), self.k_norm, self.eps), cos, sin)
        share = self.heads // self.kv_heads
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        # plain products: on a CPU they are several times as fast as the fused backward pass
        future = torch.full((time, time), -torch.inf).triu(1)
        h = (q @ (key * self.size**-0.5).transpose(-1, -2) + future).softmax(-1) @ value
        x = x + F.linear(h.transpose(1, 2).reshape(batch, time, -1), self.o)

        h = F.rms_norm(x, (d,), self.norm2, self.eps).view(-1, d)
        scores = F.linear(h, self.router).softmax(-1)
        weights, ids = scores.topk(self.k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        picked = torch.bincount(ids.flatten(), minlength=len(self.router)) / ids.numel()
        balance = len(self.router) * (picked * scores.mean(0)).sum()
        mixed = _Mixture.apply(h, ids, weights, self.gate_up, self.down)
        return x + mixed.view(batch, time, d), balance, ids


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class DemoModel(nn.Module):
    """The whole model; ``forward`` gives logits [batch, time, vocabulary], balance and picks."""

    def __init__(self, config: dict[str, Any] = CONFIG, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        d = config["hidden_size"]
        self.embed = nn.Parameter(torch.randn(config["vocab_size"], d, generator=generator) * 0.04)
        layers = range(config["num_hidden_layers"])
        self.layers = nn.ModuleList(Layer(config, generator) for _ in layers)
        self.norm = nn.Parameter(torch.ones(d))
        self.config = config

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """tokens [batch, time] -> (logits, mean balance loss, picks of each layer)."""
        size = self.config["head_dim"]
        theta = self.config["rope_parameters"]["rope_theta"]
        rate = theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
        angle = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float32), rate)
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos(), angle.sin()
        x = F.embedding(tokens, self.embed)
        balances, picks = [], []
        for layer in self.layers:
            x, balance, ids = layer(x, cos, sin)
            balances.append(balance)
            picks.append(ids)
        x = F.rms_norm(x, (x.shape[-1],), self.norm, self.config["rms_norm_eps"])
        return F.linear(x, self.embed), torch.stack(balances).mean(), picks


def state_for_transformers(model: DemoModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights as Qwen3MoeForCausalLM's checkpoints name them: three tensors an expert."""
    found = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for number, layer in enumerate(model.layers):
        at = f"model.layers.{number}."
        key, value = layer.kv.chunk(2, 0)
        found[f"{at}input_layernorm.weight"] = layer.norm1
        found[f"{at}post_attention_layernorm.weight"] = layer.norm2
        found[f"{at}self_attn.q_norm.weight"] = layer.q_norm
        found[f"{at}self_attn.k_norm.weight"] = layer.k_norm
        found[f"{at}self_attn.q_proj.weight"] = layer.q
        found[f"{at}self_attn.k_proj.weight"] = key
        found[f"{at}self_attn.v_proj.weight"] = value
        found[f"{at}self_attn.o_proj.weight"] = layer.o
        found[f"{at}mlp.gate.weight"] = layer.router
        for e in range(len(layer.down)):
            gate, up = layer.gate_up[e].chunk(2, 0)
            found[f"{at}mlp.experts.{e}.gate_proj.weight"] = gate
            found[f"{at}mlp.experts.{e}.up_proj.weight"] = up
            found[f"{at}mlp.experts.{e}.down_proj.weight"] = layer.down[e].T
    return {name: tensor.detach().to(dtype).contiguous() for name, tensor in found.items()}
