"""What all built-in objectives share: a policy term, a penalty towards a reference, an entropy bonus."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from harts_core.errors import ConfigError
from harts_core.exec.objectives.protocol import (
    Column,
    MetricSum,
    Normalise,
    ObjectiveBatch,
    ObjectiveOutput,
)

if TYPE_CHECKING:
    from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective(ABC):
    """Σ_t weight_t · (policy_t + kl_coef · KL_t − entropy_coef · H_t) over the step's trained positions.

    A subclass says what policy_t is; the advantages come with the data. With a reference policy and
    d = λ − λ_ref the penalty is one of Schulman's estimates of KL(policy ‖ reference) (2020, "Approximating
    KL divergence"): k1 = d, unbiased, whose gradient as a loss has the mean 0; k2 = d²/2, whose gradient is
    that of the divergence; k3 = exp(−d) + d − 1, unbiased and never negative.

    Metrics, plain means over the step's trained positions: those of the subclass, ``logprob``, ``kl_ref``
    with a reference, ``entropy`` with a bonus.

    Attributes:
        kl_coef: weight of the reference penalty (0 = none, and no reference log-probs are needed).
        kl: its estimate: ``k1``, ``k2`` or ``k3``.
        entropy_coef: weight of the entropy bonus (0 = none).
        normalise: what counts the same in the step's mean: every ``token``, ``sequence`` or ``group``.
    """

    kl_coef: float = 0.0
    kl: KlEstimator = "k3"
    entropy_coef: float = 0.0
    normalise: Normalise = "token"

    def __post_init__(self) -> None:
        for name in ("kl_coef", "entropy_coef"):
            require(getattr(self, name) >= 0, f"{name} must not be negative")
        self.check_options()

    def check_options(self) -> None:  # noqa: B027 (an optional hook: most have nothing more to check)
        """Refuse wrong options of a subclass.

        Raises:
            ConfigError: an option is out of its range.
        """

    @property
    def columns(self) -> tuple[Column, ...]:
        """Sampling log-probs and advantages; reference log-probs with a penalty."""
        return ("old_logprobs", "advantages", *self.reference_columns)

    @property
    def reference_columns(self) -> tuple[Column, ...]:
        """The column that the penalty needs."""
        return ("ref_logprobs",) if self.kl_coef > 0 else ()

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropies are read."""
        return self.entropy_coef > 0

    @abstractmethod
    def policy_loss(self, batch: ObjectiveBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """policy_t [P], differentiable, and values [P] whose means are metrics."""

    def position_weights(self, batch: ObjectiveBatch) -> Tensor:
        """weight_t [P]."""
        return batch.weights(self.normalise)

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveOutput:
        """The loss contribution and metric sums of one unit."""
        loss, means = self.policy_loss(batch)
        means["logprob"] = batch.logprobs
        if self.kl_coef > 0:
            means["kl_ref"] = kl_estimate(batch.logprobs - batch.column("ref_logprobs"), self.kl)
            loss = loss + self.kl_coef * means["kl_ref"]
        if self.entropy_coef > 0:
            if batch.entropy is None:
                raise KeyError("the objective needs entropies, but the batch has none")
            means["entropy"] = batch.entropy
            loss = loss - self.entropy_coef * batch.entropy
        count = float(batch.logprobs.numel())
        metrics = {name: MetricSum(total=value.detach().sum(), count=count) for name, value in means.items()}
        return ObjectiveOutput(loss=(self.position_weights(batch) * loss).sum(), metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedObjective(PolicyObjective):
    """policy_t = −min(r·A, r̄·A) with r = exp(λ − λ_old) and r̄ = clip(r, 1 − clip_low, 1 + clip_high).

    Metrics: ``ratio``; ``clip_fraction``, the share of positions where the clipped branch is the smaller one
    (no gradient); ``kl_old``, k3 of the policy against the sampling policy.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 − clip_low, 1 + clip_high].
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def check_options(self) -> None:
        """Refuse a clip range that is none."""
        require(0 <= self.clip_low <= 1, "clip_low must be in [0, 1]")
        require(self.clip_high >= 0, "clip_high must not be negative")

    def policy_loss(self, batch: ObjectiveBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate of each position."""
        log_ratio = batch.logprobs - batch.column("old_logprobs")
        loss, means = self.clipped_loss(log_ratio.exp(), batch.column("advantages"))
        return loss, {**means, "kl_old": kl_estimate(log_ratio, "k3")}

    def clipped_loss(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """−min(r·A, r̄·A) [P], and its metrics."""
        plain = ratio * advantage
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage
        fraction = (clipped < plain).to(ratio.dtype)
        return -plain.minimum(clipped), {"ratio": ratio, "clip_fraction": fraction}


def kl_estimate(log_ratio: Tensor, kind: KlEstimator) -> Tensor:
    """An estimate of KL(p ‖ q) from samples of p, elementwise.

    Args:
        log_ratio: d = log p − log q of each sample.
        kind: ``k1`` = d, ``k2`` = d²/2, ``k3`` = exp(−d) + d − 1.
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return (-log_ratio).exp() + log_ratio - 1


def require(condition: bool, what: str) -> None:
    """Refuse an option of the ``[objective]`` table."""
    if not condition:
        raise ConfigError(f"[objective] {what}")
