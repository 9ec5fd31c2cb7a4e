"""What an objective gets and returns.

The trainer calls an objective once per consumer, with the log-probabilities of that consumer's trajectories
in trajectory order. The sum of the returned losses over all consumers of all replicas is the loss of the
step, so every normaliser is step-wide and comes in ready made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from harts_core.errors import ExecError

if TYPE_CHECKING:
    from torch import Tensor

Normalise = Literal["token", "sequence", "group"]
Column = Literal["old_logprobs", "ref_logprobs", "advantages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Counts over the whole training step, all consumers of all replicas.

    Attributes:
        tokens: trained positions.
        sequences: trajectories with a trained position.
        groups: prompt groups with a trained position.
    """

    tokens: int
    sequences: int
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveBatch:
    """The trained positions of one consumer: P positions of R trajectories, all tensors on one device.

    Attributes:
        logprobs: λ [P], float32 (float64 in a float64 run), differentiable; trajectory by trajectory,
            positions in order.
        sequence: int64 [P], the trajectory of each position, in [0, R).
        rows: int64 [R], tree rows of the trajectories, ascending.
        group: int64 [R], prompt group of each trajectory, in [0, totals.groups), the same in every batch.
        sequence_tokens: [R] in the dtype of ``logprobs``, trained positions of the whole trajectory.
        group_tokens: [R], trained positions of the trajectory's whole group over the step.
        group_sequences: [R], trajectories of its group over the step.
        totals: step-wide counts.
        old_logprobs, ref_logprobs, advantages: [P], or None where the objective does not ask for it.
        entropy: H [P], nats, of the distribution that each position was predicted from, differentiable; None
            where the objective does not ask for it (``needs_entropy``).
    """

    logprobs: Tensor
    sequence: Tensor
    rows: Tensor
    group: Tensor
    sequence_tokens: Tensor
    group_tokens: Tensor
    group_sequences: Tensor
    totals: StepTotals
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    entropy: Tensor | None = None

    def column(self, name: Column) -> Tensor:
        """A metadata column [P] that the objective declared in ``columns``."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise KeyError(f"the objective uses {name} but does not name it in columns")
        return value

    def weights(self, normalise: Normalise) -> Tensor:
        """[P], weights of a step-wide mean over positions; over all batches of the step they sum to 1.

        ``token``: every trained position counts the same, 1 / tokens. ``sequence``: every trajectory counts
        the same, and the positions in it, 1 / (sequences · its positions). ``group``: every prompt group
        counts the same, and the positions in it, 1 / (groups · positions of the group).
        """
        if normalise == "token":
            return self.logprobs.new_full(self.logprobs.shape, 1 / self.totals.tokens)
        if normalise == "sequence":
            return 1 / (self.totals.sequences * self.sequence_tokens)[self.sequence]
        return 1 / (self.totals.groups * self.group_tokens)[self.sequence]

    def sequence_mean(self, values: Tensor, objective: str) -> Tensor:
        """[P] → [R], the mean over the trained positions of each trajectory.

        Args:
            values: one per position.
            objective: its name, for the error.

        Raises:
            ExecError: the plan splits a trajectory, so that this unit does not see all of its positions.
        """
        here = self.sequence.bincount(minlength=len(self.rows))
        split = (here != self.sequence_tokens).nonzero().flatten()
        if len(split):
            raise ExecError(
                f"{objective} couples all positions of a trajectory, but the plan splits trajectories",
                where=f"row {int(self.rows[split[0]])}",
                hint="use a plan of whole trajectories, or an objective of single tokens",
            )
        sums = values.new_zeros(len(self.rows)).index_add(0, self.sequence, values)
        return sums / self.sequence_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSum:
    """A metric as a sum and what to divide it by; both are added up over the step's consumers."""

    total: Tensor
    count: Tensor | float


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """One consumer's part of the step.

    Attributes:
        loss: scalar, differentiable; the sum over the step's consumers is the loss.
        metrics: metric name to its sum (detached).
    """

    loss: Tensor
    metrics: dict[str, MetricSum] = field(default_factory=dict)


class Objective(Protocol):
    """A function of log-probabilities in trajectory order.

    Implementations are frozen dataclasses: their fields are the options of the ``[objective]`` table. One
    that reads ``ObjectiveBatch.entropy`` also has ``needs_entropy``, true; one that uses
    ``ObjectiveBatch.sequence_mean`` has ``needs_whole_trajectories``, true, so that plans that split some are
    refused before the run starts.
    """

    @property
    def columns(self) -> tuple[Column, ...]:
        """The metadata columns that it needs."""

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveOutput:
        """The loss contribution and metric sums of one consumer."""


def needs_entropy(objective: Objective) -> bool:
    """Whether the objective reads the entropies; one without ``needs_entropy`` does not."""
    return bool(getattr(objective, "needs_entropy", False))


def needs_whole_trajectories(objective: Objective) -> bool:
    """Whether the objective needs all trained positions of a trajectory at once; most do not say."""
    return bool(getattr(objective, "needs_whole_trajectories", False))
