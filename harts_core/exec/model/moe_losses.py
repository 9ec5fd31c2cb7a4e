"""The router's training terms, weighted by occurrence counts, and the update of the experts' bias.

All terms are those of ordinary training on the step's S original tokens: a compact token that stands for q_c
of them counts q_c times. With z the router's logits and p = sigmoid(z) / Σ_e sigmoid(z)_e the normalised
scores of a token, per layer (MODEL.md, "MoE layer")::

    z-loss    Z = (1/S) Σ_c q_c · logsumexp(z_c)²
    balance   L = E · Σ_e f_e P_e,   f_e = n_e / (k·S),   P_e = (1/S) Σ_c q_c · p_ce
    counts    n_e = Σ_c q_c · [e among the k experts of c]

L is 1 for even loads. It couples all tokens of the step through f, which has no gradient, and is linear in
each token through P: with f known, every unit adds its own share, and the shares sum to the exact loss and
gradient. So f must be counted before the first backward pass.

Shape legend: C own tokens, L layers with experts, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harts_core.exec.model.moe import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTerms:
    """Weights of the router's losses; the loss is summed over the layers.

    Attributes:
        z_loss_coef: of Z.
        balance_loss_coef: of L.
    """

    z_loss_coef: float = 0.0
    balance_loss_coef: float = 0.0

    @property
    def has_loss(self) -> bool:
        """Whether any term enters the loss."""
        return self.z_loss_coef > 0 or self.balance_loss_coef > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSums:
    """Sums over the tokens of some units, each token q_c times; those of two units add up.

    Attributes:
        counts: int64 [L, E], n_e: original tokens' choices of each expert.
        mass: float64 [L, E], Σ q · p.
        z: float64 [L], Σ q · logsumexp(z)².
        tokens: Σ q, original tokens.
    """

    counts: Tensor
    mass: Tensor
    z: Tensor
    tokens: int

    def __add__(self, other: RouterSums) -> RouterSums:
        return RouterSums(
            counts=self.counts + other.counts,
            mass=self.mass + other.mass,
            z=self.z + other.z,
            tokens=self.tokens + other.tokens,
        )

    @property
    def load(self) -> Tensor:
        """f, float64 [L, E]: the share of each expert; a layer's shares sum to 1."""
        return self.counts.double() / self.counts.sum(-1, keepdim=True).clamp(min=1)

    def metrics(self) -> dict[str, float]:
        """Statistics of the tokens summed so far.

        ``router_z_loss`` and ``balance_loss``: means over the layers of Z and L, whatever their weight in the
        loss. ``expert_load_max`` and ``expert_load_min``: the largest and smallest load of an expert of any
        layer, as a multiple of the layer's mean. ``experts_idle``: experts without a token, all layers.
        """
        if not self.tokens:
            return {}
        num_experts = self.counts.shape[1]
        load = self.load
        return {
            "router_z_loss": float((self.z / self.tokens).mean()),
            "balance_loss": float((num_experts * load * self.mass / self.tokens).sum(-1).mean()),
            "expert_load_max": float(load.max()) * num_experts,
            "expert_load_min": float(load.min()) * num_experts,
            "experts_idle": float((self.counts == 0).sum()),
        }


def router_sums(routing: Sequence[Routing], occurrences: Tensor) -> RouterSums:
    """Count and sum a unit's routing; nothing keeps a graph.

    Args:
        routing: of every layer with experts, in order; at least one.
        occurrences: int64 [C], q_c.
    """
    parts = []
    for layer in routing:
        z, probability = _token_terms(layer.logits.detach())
        q = occurrences.to(z.dtype)
        parts.append((_counts(layer, occurrences), (q @ probability).double(), torch.dot(q, z).double()))
    counts, mass, z_sum = zip(*parts, strict=True)
    return RouterSums(
        counts=torch.stack(counts),
        mass=torch.stack(mass),
        z=torch.stack(z_sum),
        tokens=int(occurrences.sum()),
    )


def router_losses(
    routing: Sequence[Routing],
    occurrences: Tensor,
    terms: RouterTerms,
    *,
    original_tokens: int,
    load: Tensor | None = None,
) -> Tensor:
    """A unit's share of the router's losses; the shares of a step's units sum to the loss.

    Args:
        routing: of every layer with experts, in order; at least one.
        occurrences: int64 [C], q_c.
        terms: the weights.
        original_tokens: S of the whole step, all replicas.
        load: f of the whole step, [L, E] (``RouterSums.load``); needed where the balance loss has a weight.

    Returns:
        Scalar in the dtype of the logits, differentiable in them.
    """
    if terms.balance_loss_coef > 0 and load is None:
        raise ValueError("the balance loss needs the expert loads of the whole step")
    q = occurrences.to(routing[0].logits.dtype) / original_tokens
    loss = q.new_zeros(())
    for index, layer in enumerate(routing):
        z, probability = _token_terms(layer.logits)
        if terms.z_loss_coef > 0:
            loss = loss + terms.z_loss_coef * torch.dot(q, z)
        if load is not None and terms.balance_loss_coef > 0:
            share = load[index].to(probability.dtype)
            scale = terms.balance_loss_coef * len(share)
            loss = loss + scale * torch.dot(q, probability @ share)
    return loss


@torch.no_grad()
def update_expert_bias(biases: Sequence[Tensor], counts: Tensor, rate: float) -> None:
    """bias_e += rate · sign(mean load − load_e), in place: an expert below its share is chosen more.

    The comparison is of integers, so it does not depend on the order of the sums.

    Args:
        biases: [E] of every layer with experts, in order.
        counts: int64 [L, E], n_e of the whole step over all replicas.
        rate: step of the bias, ≥ 0.
    """
    above = counts.sum(-1, keepdim=True) - counts.shape[1] * counts
    for bias, sign in zip(biases, torch.sign(above), strict=True):
        bias.add_(sign.to(bias.dtype), alpha=rate)


def _token_terms(logits_CE: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp(z)² [C] and the normalised scores [C, E] of every token."""
    scores = torch.sigmoid(logits_CE)
    return torch.logsumexp(logits_CE, -1).square(), scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _counts(layer: Routing, occurrences: Tensor) -> Tensor:
    """int64 [E]; integer sums, the same in any order."""
    counts = occurrences.new_zeros(layer.logits.shape[1])
    return counts.index_add_(
        0, layer.experts.flatten(), occurrences.repeat_interleave(layer.experts.shape[1])
    )
