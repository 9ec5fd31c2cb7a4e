"""Training steps: every consumer's forward, objective and backward, then one optimizer update.

One process runs the consumers of all replicas one after another, slot by slot. Normalisers are step-wide, so
the accumulated gradients do not depend on how the plan cut the step into microbatches.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch import Tensor

from harts_core.errors import DataError, NonFiniteError
from harts_core.exec.config import Recompute
from harts_core.exec.head import unit_logprobs
from harts_core.exec.metrics import StepMetrics
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import MetricSum, Objective
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.step_data import StepData, build_step_data
from harts_core.exec.unit import unit_hidden
from harts_core.plan.bundle import PlanBundle
from harts_core.progress import Progress, no_progress
from harts_core.trees.rollout_tree import RolloutTree

MAX_PREPARED = 4
"""Plans whose index arrays are kept for a later step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The loss of a step whose gradients have been accumulated.

    Attributes:
        loss: sum of the consumers' contributions.
        grad_norm: global norm of the accumulated gradients.
        metrics: the objective's metrics, means over the step.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, float]


class Trainer:
    """Trains a model on plans.

    Args:
        model: the model; its device and dtype are used.
        objective: the loss.
        optimizer: over the model's parameters.
        recompute: ``none``, or ``layer``: recompute activations in the backward pass.
        head_block_rows: rows of vocabulary logits held at a time.
        steps_done: optimizer steps already taken (a resumed run).
    """

    def __init__(
        self,
        model: HybridModel,
        objective: Objective,
        optimizer: Optimizer,
        *,
        recompute: Recompute = "none",
        head_block_rows: int = 1024,
        steps_done: int = 0,
    ) -> None:
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.recompute = recompute
        self.head_block_rows = head_block_rows
        self.steps_done = steps_done
        self._device = next(model.parameters()).device
        self._prepared: list[StepData] = []

    def prepare(self, bundle: PlanBundle, tree: RolloutTree) -> StepData:
        """Validate a plan and join it with its tree; kept, so that later steps on it start at once.

        Raises:
            InvalidPlanError, ExecError, DataError: see ``build_step_data``; or the tree has token ids that
                the model's vocabulary lacks.
        """
        for data in self._prepared:
            if data.bundle is bundle and data.tree is tree:
                return data
        largest = int(tree.suffix.values.max())
        if largest >= self.model.config.vocab_size:
            raise DataError(
                f"the tree has token id {largest}, the model's vocabulary ends at "
                f"{self.model.config.vocab_size - 1}",
                hint="use the model whose tokenizer made the rollouts",
            )
        data = build_step_data(bundle, tree, self.objective.columns)
        self._prepared = [*self._prepared, data][-MAX_PREPARED:]
        return data

    def step(self, bundle: PlanBundle, tree: RolloutTree, progress: Progress = no_progress) -> StepMetrics:
        """One optimizer step on a plan.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite; the unit is named, nothing was updated.
            InvalidPlanError, ExecError, DataError: see ``prepare``.
        """
        start = time.perf_counter()
        result = self.backward(bundle, tree, progress)
        rate = self.optimizer.step(self.steps_done, result.grad_norm)
        self.steps_done += 1
        seconds = time.perf_counter() - start
        data = self.prepare(bundle, tree)
        calls = [len(data.layout(u).rounds) for u in data.consumers]
        original = int(bundle.metrics["original_tokens"])
        return StepMetrics(
            step=self.steps_done,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=rate,
            original_tokens=original,
            compact_tokens=int(bundle.units.computed_tokens.sum()),
            trained_positions=data.totals.tokens,
            units=len(data.consumers),
            rounds=sum(calls),
            seconds=seconds,
            tokens_per_s=original / seconds,
            objective=result.metrics,
        )

    def backward(self, bundle: PlanBundle, tree: RolloutTree, progress: Progress = no_progress) -> StepLoss:
        """Accumulate the gradients of a step in the optimizer, without an update.

        Raises:
            NonFiniteError: as ``step``; all gradients are forgotten.
        """
        data = self.prepare(bundle, tree)
        self.optimizer.zero_grad()
        loss, norm = 0.0, 0.0
        sums: dict[str, list[float]] = {}
        for done, unit in enumerate(data.consumers):
            progress("units", done, len(data.consumers))
            if not len(data.layout(unit).trained_row):
                continue  # it adds nothing to the loss
            value, metrics = self._run_unit(data, unit)
            norm = self.optimizer.grad_norm()
            if not (math.isfinite(value) and math.isfinite(norm)):
                self.optimizer.zero_grad()
                what = "a gradient" if math.isfinite(value) else "the loss"
                raise NonFiniteError(
                    f"{what} is not finite; nothing was updated",
                    where=f"step {self.steps_done + 1}, unit {unit}, rows {_rows_of(data, unit)}",
                    hint="look at these rows' log-probs and advantages; lower the learning rate",
                )
            loss += value
            for name, metric in metrics.items():
                total = sums.setdefault(name, [0.0, 0.0])
                total[0] += float(metric.total)
                total[1] += float(metric.count)
        progress("units", len(data.consumers), len(data.consumers))
        means = {name: total / count for name, (total, count) in sums.items() if count}
        return StepLoss(loss=loss, grad_norm=norm, metrics=means)

    def logprobs(self, data: StepData, unit: int) -> Tensor:
        """λ of a unit's trained positions, ordered by (row, position), differentiable."""
        layout = data.layout(unit).to(self._device)
        hidden = unit_hidden(self.model, layout, recompute=self.recompute)
        return unit_logprobs(self.model, hidden, layout, block_rows=self.head_block_rows)

    def _run_unit(self, data: StepData, unit: int) -> tuple[float, dict[str, MetricSum]]:
        """Forward and backward of one consumer; a loss that is not finite has no backward."""
        output = self.objective(data.batch(unit, self.logprobs(data, unit)))
        value = float(output.loss.detach())
        if math.isfinite(value):
            output.loss.backward()  # type: ignore[no-untyped-call]
        return value, output.metrics


def _rows_of(data: StepData, unit: int, shown: int = 5) -> str:
    rows = data.bundle.assignments.row[data.bundle.assignments.unit == unit].tolist()
    more = ", …" if len(rows) > shown else ""
    return ", ".join(map(str, rows[:shown])) + more
