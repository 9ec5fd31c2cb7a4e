"""Group-relative policy optimisation with clipping and a penalty towards a reference policy."""

from __future__ import annotations

from dataclasses import dataclass

from harts_core.errors import ConfigError
from harts_core.exec.objectives.protocol import (
    Column,
    MetricSum,
    Normalise,
    ObjectiveBatch,
    ObjectiveOutput,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    """GRPO (Shao et al. 2024, DeepSeekMath, equation 3); the advantages come with the data.

    With r = exp(λ − λ_old) and the clipped ratio r̄ = clip(r, 1 − clip_low, 1 + clip_high), the loss is the
    mean over trained positions, as ``normalise`` says, of::

        −min(r·A, r̄·A) + kl_coef · k3,    k3 = exp(λ_ref − λ) − (λ_ref − λ) − 1 ≥ 0

    k3 is the unbiased, low-variance estimate of KL(policy ‖ reference).

    Metrics (plain means over the step's trained positions): ``ratio``; ``clip_fraction``, the share where
    the clipped branch is the smaller one; ``kl_old``, k3 of the policy against the sampling policy;
    ``kl_ref`` with a reference; ``logprob``.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 − clip_low, 1 + clip_high].
        kl_coef: weight of the reference penalty; 0 = none, and no reference log-probs are needed.
        normalise: ``token``, ``sequence`` or ``group`` (``ObjectiveBatch.weights``).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    normalise: Normalise = "token"

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ConfigError("[objective] clip_low must be in [0, 1]")
        if self.clip_high < 0:
            raise ConfigError("[objective] clip_high must not be negative")
        if self.kl_coef < 0:
            raise ConfigError("[objective] kl_coef must not be negative")

    @property
    def columns(self) -> tuple[Column, ...]:
        """Sampling log-probs and advantages; reference log-probs with a penalty."""
        reference: tuple[Column, ...] = ("ref_logprobs",) if self.kl_coef > 0 else ()
        return ("old_logprobs", "advantages", *reference)

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveOutput:
        """The loss contribution and metric sums of one consumer."""
        weight = batch.weights(self.normalise)
        advantage = batch.column("advantages")
        log_ratio = batch.logprobs - batch.column("old_logprobs")
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -(ratio * advantage).minimum(clipped * advantage)
        means = {
            "ratio": ratio,
            "clip_fraction": (clipped * advantage < ratio * advantage).to(ratio.dtype),
            "kl_old": (-log_ratio).exp() + log_ratio - 1,
            "logprob": batch.logprobs,
        }
        if self.kl_coef > 0:
            log_reference = batch.column("ref_logprobs") - batch.logprobs
            kl = log_reference.exp() - log_reference - 1
            loss = loss + self.kl_coef * kl
            means["kl_ref"] = kl
        count = float(batch.logprobs.numel())
        metrics = {name: MetricSum(total=value.detach().sum(), count=count) for name, value in means.items()}
        return ObjectiveOutput(loss=(weight * loss).sum(), metrics=metrics)
