"""Group sequence policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harts_core.exec.objectives.policy import ClippedObjective, kl_estimate
from harts_core.exec.objectives.protocol import Normalise, ObjectiveBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(ClippedObjective):
    """GSPO (Zheng et al. 2025): one importance ratio for a whole trajectory.

    s = exp(mean over its trained positions of λ − λ_old), and policy_t = −min(s·A_t, s̄·A_t) at each of them,
    so that with one advantage for the trajectory the mean over it is the paper's −min(s·A, s̄·A).

    A plan that splits trajectories (psRL) is refused. ``ratio`` and ``clip_fraction`` are those of s.

    Attributes:
        clip_low, clip_high: s is clipped to [1 − clip_low, 1 + clip_high].
        normalise: what counts the same in the step's mean: every ``token``, ``sequence`` or ``group``.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    normalise: Normalise = "sequence"

    @property
    def needs_whole_trajectories(self) -> bool:
        """Yes: the ratio is a mean over the trajectory."""
        return True

    def policy_loss(self, batch: ObjectiveBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate of each position, with its trajectory's ratio."""
        log_ratio = batch.logprobs - batch.column("old_logprobs")
        ratio = batch.sequence_mean(log_ratio, "gspo").exp()[batch.sequence]
        loss, means = self.clipped_loss(ratio, batch.column("advantages"))
        return loss, {**means, "kl_old": kl_estimate(log_ratio, "k3")}
