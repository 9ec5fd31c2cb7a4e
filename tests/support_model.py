"""An independent reference model for the tests: one trajectory at a time, written from the formulas.

The reference shares no code with ``harts_core.exec``: it reads the same parameter tensors by name and
evaluates the model in the plainest way: token-by-token delta rule, dense softmax over all earlier tokens,
loops over tokens and experts, log_softmax over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model.decoder import HybridModel
from harts_core.plan.build import build_bundle
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cost_model import DEFAULT_COST_MODEL, load_cost_model
from harts_core.trees.rollout_tree import RolloutTree

Weights = dict[str, Tensor]
Router = tuple[Tensor, list[list[int]]]
"""Logits [T, E] and each token's chosen experts."""


def simple_bundle(
    tree: RolloutTree, *, sharing: str = "tree", chunk: int = 16, units: int = 2, seed: int = 0
) -> PlanBundle:
    """A plan with the rows dealt randomly to ``units`` consumers of one replica."""
    rng = np.random.default_rng(seed)
    slot = np.arange(tree.num_rows) % units
    rng.shuffle(slot)
    parameters = {"dp": 1, "capacity": tree.original_tokens, "pad": 1, "chunk": chunk, "seed": seed}
    return build_bundle(
        tree,
        planner="expanded" if sharing == "none" else "test",
        parameters=parameters,
        cost_model=load_cost_model(DEFAULT_COST_MODEL),
        replica=np.zeros(tree.num_rows, np.int32),
        slot=slot.astype(np.int32),
        sharing=sharing,
    )


def lively_model(
    config: ModelConfig, dtype: torch.dtype, *, backend: str = "torch", seed: int = 0
) -> HybridModel:
    """A model whose every parameter matters: norms off one, biased routing, matrices of unit gain.

    The same values for every dtype: they are rounded to float32 first.
    """
    model = HybridModel(config, dtype=dtype, kda_backend=backend, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model_weights(model).items():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith("expert_bias"):
                tensor.copy_(0.1 * noise)
            elif name.endswith(("A_log", "dt_bias")):
                tensor.copy_(0.3 * noise - 1)
            elif name.endswith(("conv1d.weight", "word_embeddings.weight")):
                tensor.copy_(0.5 * noise)
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
    return model


def model_weights(model: torch.nn.Module) -> Weights:
    """Parameters and buffers by name; the parameters themselves, so that gradients reach them."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def reference_logprobs(
    config: Any, weights: Weights, tree: RolloutTree, routers: list[list[Router]] | None = None
) -> list[Tensor]:
    """For each row, λ of its trained positions, in float of the weights; its routing goes to ``routers``."""
    result = []
    for row in range(tree.num_rows):
        tokens = torch.tensor(tree.tokens(row).astype(np.int64))
        routing: list[Router] = []
        hidden = reference_hidden(config, weights, tokens, routing)
        if routers is not None:
            routers.append(routing)
        logp = F.log_softmax(hidden @ weights["lm_head.weight"].t(), dim=-1)
        trained = torch.tensor(tree.trained_positions(row).astype(np.int64))
        result.append(logp[trained - 1, tokens[trained]])
    return result


def reference_hidden(
    config: Any, weights: Weights, tokens: Tensor, routers: list[Router] | None = None
) -> Tensor:
    """[T, D] after the final norm; the routing of every expert layer is appended to ``routers``."""
    x = weights["model.word_embeddings.weight"][tokens]
    for i in range(config.num_hidden_layers):

        def w(name: str, i: int = i) -> Tensor:
            return weights[f"model.layers.{i}.{name}"]

        normed = _rms(x, w("input_layernorm.weight"), config.rms_norm_eps)
        mla = (i + 1) % config.layer_group_size == 0
        x = x + (_mla(config, w, normed) if mla else _kda(config, w, normed))
        normed = _rms(x, w("post_attention_layernorm.weight"), config.rms_norm_eps)
        if i < config.first_k_dense_replace:
            x = x + _swiglu(w, "mlp.", normed)
        else:
            x = x + _moe(config, w, normed, routers)
    return _rms(x, weights["model.norm.weight"], config.rms_norm_eps)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _kda(config: Any, w: Callable[[str], Tensor], x: Tensor) -> Tensor:
    T, H, K = len(x), config.num_attention_heads, config.head_dim

    def conv(name: str) -> Tensor:
        pre = x @ w(f"attention.{name}_proj.weight").t()
        kernel = w(f"attention.{name}_conv1d.weight")[:, 0]
        y = torch.zeros_like(pre)
        for back in range(4):  # the input ``back`` tokens ago, zero before the first token
            y = y + kernel[:, 3 - back] * torch.cat([pre.new_zeros(back, H * K), pre])[:T]
        return (y * torch.sigmoid(y)).reshape(T, H, K)

    q, k, v = conv("q"), conv("k"), conv("v")
    q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) / K**0.5
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    f = (x @ w("attention.f_proj.weight").t() + w("attention.dt_bias")).reshape(T, H, K)
    rate = torch.exp(w("attention.A_log"))[:, None]
    if config.kda_safe_gate:
        g = config.kda_lower_bound * torch.sigmoid(rate * f)
    else:
        g = -rate * torch.log1p(torch.exp(f))
    beta = torch.sigmoid(x @ w("attention.b_proj.weight").t())
    state = x.new_zeros(H, K, K)
    out = []
    for t in range(T):
        state = torch.exp(g[t])[:, :, None] * state
        error = v[t] - (state * k[t][:, :, None]).sum(1)
        state = state + beta[t][:, None, None] * k[t][:, :, None] * error[:, None, :]
        out.append((state * q[t][:, :, None]).sum(1))
    o = torch.stack(out)
    gate = torch.sigmoid((x @ w("attention.g_proj.weight").t()).reshape(T, H, K))
    o = _rms(o, w("attention.o_norm.weight"), config.rms_norm_eps) * gate
    return o.reshape(T, H * K) @ w("attention.dense.weight").t()


def _rotate(x: Tensor, theta: float) -> Tensor:
    """[T, …, R]: pairs (2i, 2i + 1) as complex numbers turned by t · θ^(−2i/R)."""
    T, R = len(x), x.shape[-1]
    angle = torch.arange(T, dtype=x.dtype)[:, None] * theta ** (-torch.arange(0, R, 2, dtype=x.dtype) / R)
    turn = torch.polar(torch.ones_like(angle), angle).reshape(T, *[1] * (x.dim() - 2), R // 2)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], R // 2, 2).contiguous())
    return torch.view_as_real(pairs * turn).reshape(x.shape)


def _mla(config: Any, w: Callable[[str], Tensor], x: Tensor) -> Tensor:
    T, H = len(x), config.num_attention_heads
    nope, rope, dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    if config.q_lora_rank is None:
        q = x @ w("attention.q_proj.weight").t()
    else:
        low = _rms(x @ w("attention.q_a_proj.weight").t(), w("attention.q_a_layernorm.weight"), 1e-6)
        q = low @ w("attention.q_b_proj.weight").t()
    q = q.reshape(T, H, nope + rope)
    kva = x @ w("attention.kv_a_proj_with_mqa.weight").t()
    latent = _rms(kva[:, : config.kv_lora_rank], w("attention.kv_a_layernorm.weight"), 1e-6)
    k_rope = _rotate(kva[:, config.kv_lora_rank :], config.rope_theta)
    q_rope = _rotate(q[:, :, nope:], config.rope_theta)
    kv = (latent @ w("attention.kv_b_proj.weight").t()).reshape(T, H, nope + dv)
    heads = []
    mask = torch.full((T, T), float("-inf"), dtype=x.dtype).triu(1)
    gate = torch.sigmoid(x @ w("attention.g_proj.weight").t())
    for h in range(H):
        scores = q[:, h, :nope] @ kv[:, h, :nope].t() + q_rope[:, h] @ k_rope.t()
        p = torch.softmax(scores / (nope + rope) ** 0.5 + mask, dim=-1)
        heads.append((p @ kv[:, h, nope:]) * gate[:, h : h + 1])
    return torch.cat(heads, -1) @ w("attention.dense.weight").t()


def _swiglu(w: Callable[[str], Tensor], prefix: str, x: Tensor) -> Tensor:
    a = x @ w(f"{prefix}gate_proj.weight").t()
    return (a * torch.sigmoid(a) * (x @ w(f"{prefix}up_proj.weight").t())) @ w(
        f"{prefix}down_proj.weight"
    ).t()


def _moe(config: Any, w: Callable[[str], Tensor], x: Tensor, routers: list[Router] | None) -> Tensor:
    logits = x @ w("mlp.gate.weight").t()
    scores = torch.sigmoid(logits)
    rows, chosen = [], []
    for t in range(len(x)):
        experts = chosen_experts(config, (scores[t] + w("mlp.gate.expert_bias")).tolist())
        chosen.append(experts)
        weight = scores[t][experts] / (scores[t][experts].sum() + 1e-20) * config.routed_scaling_factor
        y = torch.zeros_like(x[t])
        for e, share in zip(experts, weight, strict=True):
            a = w("mlp.experts.gate_proj")[e] @ x[t]
            y = y + share * (
                w("mlp.experts.down_proj")[e] @ (a * torch.sigmoid(a) * (w("mlp.experts.up_proj")[e] @ x[t]))
            )
        rows.append(y)
    if routers is not None:
        routers.append((logits, chosen))
    return torch.stack(rows) + _swiglu(w, "mlp.shared_experts.", x)


def chosen_experts(config: Any, choice: list[float]) -> list[int]:
    """The top-k of the best groups by plain sorting; ties go to the lowest index."""
    size = config.num_experts // config.n_group

    def group_score(group: int) -> float:
        return sum(sorted(choice[group * size : (group + 1) * size])[-2:])

    groups = sorted(range(config.n_group), key=lambda j: (-group_score(j), j))[: config.topk_group]
    open_experts: Iterable[int] = [e for j in groups for e in range(j * size, (j + 1) * size)]
    return sorted(open_experts, key=lambda e: (-choice[e], e))[: config.num_experts_per_tok]
