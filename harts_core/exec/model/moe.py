"""The mixture of experts: group-limited sigmoid router, routed experts and a shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts_core.exec.kda import state_dtype
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model.experts import Experts
from harts_core.exec.model.mlp import SwiGLU

if TYPE_CHECKING:
    from harts_core.exec.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """One layer's routing decisions, kept for the router's losses.

    Attributes:
        logits: [C, E] in the state dtype.
        weights: [C, k], routing weights.
        experts: int64 [C, k], best first.
    """

    logits: Tensor
    weights: Tensor
    experts: Tensor


class Router(nn.Module):
    """Scores in the state dtype; ``expert_bias`` [E] steers the choice, not the weights."""

    expert_bias: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        dtype = state_dtype(dtype)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=dtype))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=dtype))

    def forward(self, x_CD: Tensor) -> Routing:
        """Choose each token's experts.

        The best ``topk_group`` groups by the sum of their two best choice scores, then the best experts among
        them. Sorting is stable, so that equal scores go to the lowest index.
        """
        config = self.config
        logits = F.linear(x_CD.to(self.weight.dtype), self.weight)
        scores = torch.sigmoid(logits)
        choice = (scores + self.expert_bias).detach()
        grouped = choice.view(-1, config.n_group, config.num_experts // config.n_group)
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
        dropped = _best(group_score, config.n_group)[:, config.topk_group :]
        closed = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, dropped, True)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
        experts = _best(choice, config.num_experts_per_tok)
        weights = scores.gather(1, experts)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(logits=logits, weights=weights * config.routed_scaling_factor, experts=experts)


def _best(score: Tensor, k: int) -> Tensor:
    return torch.sort(score, dim=-1, descending=True, stable=True).indices[:, :k]


def shared_width(config: ModelConfig) -> int:
    """Intermediate width of the shared expert: all shared experts side by side."""
    return config.moe_intermediate_size * config.num_shared_experts


class MoE(nn.Module):
    """Routed experts plus the shared expert, all on this rank."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = Router(config, dtype)
        spec.mark_rows(self.gate.weight)
        self.experts = Experts(config, dtype)
        self.shared_experts = SwiGLU(config.hidden_size, shared_width(config), dtype, spec)

    def forward(self, x_CD: Tensor) -> tuple[Tensor, Routing]:
        """[C, D] → [C, D], and the routing."""
        # in this order, which is Megatron-core's: in bfloat16 the bits of x's gradient depend on it
        shared = self.shared_experts(x_CD)
        routing: Routing = self.gate(x_CD)
        return self.experts(x_CD, routing.weights, routing.experts) + shared, routing
