"""Objectives that weight the score ∇λ: REINFORCE and CISPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harts_core.exec.objectives.policy import PolicyObjective, kl_estimate, require
from harts_core.exec.objectives.protocol import Column, ObjectiveBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(PolicyObjective):
    """REINFORCE (Williams 1992): policy_t = −A·λ, for rollouts of the current policy.

    No sampling log-probs are needed, and nothing corrects for a policy that has moved since.
    """

    @property
    def columns(self) -> tuple[Column, ...]:
        """Advantages; reference log-probs with a penalty."""
        return ("advantages", *self.reference_columns)

    def policy_loss(self, batch: ObjectiveBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """−A·λ of each position."""
        return -batch.column("advantages") * batch.logprobs, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(PolicyObjective):
    """CISPO (MiniMax 2025, MiniMax-M1): policy_t = −sg(r̄)·A·λ.

    r̄ = clip(exp(λ − λ_old), 1 − clip_low, 1 + clip_high) and sg stops the gradient, so that a clipped
    position still contributes its score. The defaults clip only from above, at 5.

    Metrics: ``ratio``; ``clip_fraction``, the share of ratios outside the range; ``kl_old``, k3 of the policy
    against the sampling policy.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 − clip_low, 1 + clip_high].
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def check_options(self) -> None:
        """Refuse a clip range that is none."""
        require(0 <= self.clip_low <= 1, "clip_low must be in [0, 1]")
        require(self.clip_high >= 0, "clip_high must not be negative")

    def policy_loss(self, batch: ObjectiveBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """−sg(r̄)·A·λ of each position."""
        log_ratio = (batch.logprobs - batch.column("old_logprobs")).detach()
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        means = {
            "ratio": ratio,
            "clip_fraction": (clipped != ratio).to(ratio.dtype),
            "kl_old": kl_estimate(log_ratio, "k3"),
        }
        return -clipped * batch.column("advantages") * batch.logprobs, means
