"""Training steps: every consumer's forward, objective and backward, then one optimizer update.

One process runs the consumers of all replicas one after another, slot by slot. Normalisers are step-wide, so
the accumulated gradients do not depend on how the plan cut the step into microbatches.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch import Tensor

from harts_core.errors import NonFiniteError
from harts_core.exec.config import Recompute
from harts_core.exec.head import unit_logprobs
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.exec.metrics import StepMetrics
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import MetricSum, Objective
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.step_data import StepData, build_step_data
from harts_core.exec.unit import unit_hidden
from harts_core.plan.bundle import PlanBundle
from harts_core.progress import Progress, no_progress
from harts_core.trees.rollout_tree import RolloutTree


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

    def prepare(self, bundle: PlanBundle, tree: RolloutTree) -> StepData:
        """Validate a plan and join it with its tree, once for any number of steps on it.

        Raises:
            InvalidPlanError, ExecError, DataError: see ``build_step_data``.
        """
        return build_step_data(bundle, tree, self.objective.columns, vocab_size=self.model.config.vocab_size)

    def step(self, bundle: PlanBundle, tree: RolloutTree, progress: Progress = no_progress) -> StepMetrics:
        """``prepare`` and ``step_on``: one optimizer step on a plan."""
        return self.step_on(self.prepare(bundle, tree), progress)

    def step_on(self, data: StepData, progress: Progress = no_progress) -> StepMetrics:
        """One optimizer step.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite; the unit is named, nothing was updated.
        """
        start = time.perf_counter()
        result = self.backward(data, progress)
        rate = self.optimizer.step(self.steps_done, result.grad_norm)
        self.steps_done += 1
        seconds = time.perf_counter() - start
        plan = data.bundle.metrics
        return StepMetrics(
            step=self.steps_done,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=rate,
            original_tokens=int(plan["original_tokens"]),
            compact_tokens=int(data.bundle.units.computed_tokens.sum()),
            trained_positions=data.totals.tokens,
            units=len(data.consumers),
            rounds=int(plan["num_rounds"]),
            seconds=seconds,
            tokens_per_s=plan["original_tokens"] / seconds,
            objective=result.metrics,
        )

    def backward(self, data: StepData, progress: Progress = no_progress) -> StepLoss:
        """Accumulate the gradients of a step in the optimizer, without an update.

        Raises:
            NonFiniteError: as ``step_on``; all gradients are forgotten.
        """
        self.optimizer.zero_grad()
        loss, norm = 0.0, 0.0
        sums: dict[str, list[float]] = {}
        for done, unit in enumerate(data.consumers):
            progress("units", done, len(data.consumers))
            layout = build_unit_layout(data.bundle, data.tree, unit)
            if not len(layout.trained_row):
                continue  # it adds nothing to the loss
            value, metrics = self._run_unit(data, layout)
            norm = self.optimizer.grad_norm()
            if not (math.isfinite(value) and math.isfinite(norm)):
                self.optimizer.zero_grad()
                what = "a gradient" if math.isfinite(value) else "the loss"
                raise NonFiniteError(
                    f"{what} is not finite; nothing was updated",
                    where=f"step {self.steps_done + 1}, unit {unit}, rows {_some_rows(data, unit)}",
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

    def logprobs(self, layout: UnitLayout) -> Tensor:
        """λ of a unit's trained positions, ordered by (row, position), differentiable."""
        hidden = unit_hidden(self.model, layout, recompute=self.recompute)
        return unit_logprobs(self.model, hidden, layout, block_rows=self.head_block_rows)

    def _run_unit(self, data: StepData, layout: UnitLayout) -> tuple[float, dict[str, MetricSum]]:
        """Forward and backward of one consumer; a loss that is not finite has no backward."""
        output = self.objective(data.batch(layout, self.logprobs(layout)))
        value = float(output.loss.detach())
        if math.isfinite(value):
            output.loss.backward()  # type: ignore[no-untyped-call]
        return value, output.metrics


def _some_rows(data: StepData, unit: int, shown: int = 5) -> str:
    rows = data.bundle.assignments.row[data.bundle.assignments.unit == unit].tolist()
    more = ", …" if len(rows) > shown else ""
    return ", ".join(map(str, rows[:shown])) + more
