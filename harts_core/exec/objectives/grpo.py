"""The objectives with a per-token clipped ratio: GRPO, Dr. GRPO, DAPO and PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harts_core.exec.objectives.policy import ClippedObjective, require
from harts_core.exec.objectives.protocol import Normalise, ObjectiveBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo(ClippedObjective):
    """GRPO (Shao et al. 2024, DeepSeekMath, equation 3): every trajectory counts the same.

    The paper's penalty is k3 with kl_coef 0.04; here it is off unless asked for.

    Attributes:
        normalise: what counts the same in the step's mean: every ``token``, ``sequence`` or ``group``.
    """

    normalise: Normalise = "sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dapo(ClippedObjective):
    """DAPO (Yu et al. 2025): a higher upper bound, and every token counts the same.

    Dynamic sampling and overlong reward shaping happen before the data reach training.

    Attributes:
        clip_high: the ratio is clipped from above at 1 + clip_high.
    """

    clip_high: float = 0.28


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGrpo(ClippedObjective):
    """Dr. GRPO (Liu et al. 2025): a sum over tokens divided by a constant, so that length has no weight.

    weight_t = 1 / (trajectories of the step · max_tokens). The advantages should be rewards minus the mean of
    the group, not divided by the standard deviation.

    Attributes:
        max_tokens: the constant, the generation budget in the paper.
    """

    max_tokens: int

    def check_options(self) -> None:
        """Refuse a constant that cannot divide."""
        ClippedObjective.check_options(self)  # super() does not work in dataclasses with slots
        require(self.max_tokens >= 1, "max_tokens must be at least 1")
        require(self.normalise == "token", "normalise has no meaning for dr_grpo: max_tokens normalises")

    def position_weights(self, batch: ObjectiveBatch) -> Tensor:
        """The same for every position."""
        weight = 1 / (batch.totals.sequences * self.max_tokens)
        return batch.logprobs.new_full(batch.logprobs.shape, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo(ClippedObjective):
    """PPO's clipped policy loss (Schulman et al. 2017, equation 7), optionally with a dual clip.

    With dual_clip = c, where A < 0: policy_t = −max(min(r·A, r̄·A), c·A) (Ye et al. 2020), so that
    a large ratio cannot make the loss arbitrarily large. There is no value function here: advantages, per
    token or per trajectory, come with the data.

    Metrics: also ``dual_clip_fraction``, the share of positions bounded by c.

    Attributes:
        dual_clip: c > 1, or 0 for none.
    """

    dual_clip: float = 0.0

    def check_options(self) -> None:
        """Refuse a dual clip inside the ratio's own range."""
        ClippedObjective.check_options(self)
        require(self.dual_clip == 0 or self.dual_clip > 1, "dual_clip must be above 1, or 0 for none")

    def clipped_loss(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped loss, bounded by −c·A where A < 0."""
        loss, means = ClippedObjective.clipped_loss(self, ratio, advantage)
        if not self.dual_clip:
            return loss, means
        bound = -self.dual_clip * advantage
        bounded = (advantage < 0) & (loss > bound)
        means["dual_clip_fraction"] = bounded.to(ratio.dtype)
        return bound.where(bounded, loss), means
