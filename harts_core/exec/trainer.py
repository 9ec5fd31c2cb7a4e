"""Training steps: every unit's forward, objective and backward, then one optimizer update.

A process runs its replicas (a single one: all) one after another, each in its forward order, so that the
interfaces of one replica live at a time. Gradients and statistics are then summed over the processes.
Normalisers are step-wide: the accumulated gradients do not depend on how the plan cut the step into
microbatches.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from harts_core.errors import NonFiniteError
from harts_core.exec.blocks import CacheSettings
from harts_core.exec.config import LinearCalls
from harts_core.exec.head import unit_head, unit_logprobs
from harts_core.exec.layout import UnitLayout
from harts_core.exec.metrics import StepMetrics
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.model.moe_losses import RouterTerms, update_expert_bias
from harts_core.exec.objectives import Objective, needs_entropy
from harts_core.exec.optimizer import StepOptimizer
from harts_core.exec.parallel.ranks import ONE_PROCESS, Ranks, StepSums
from harts_core.exec.router import StepRouter
from harts_core.exec.step_data import StepData, build_step_data
from harts_core.exec.unit import unit_hidden
from harts_core.exec.windows import ExecutionCounts, UnitExecutor, UnitForward
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.recompute import Recompute
from harts_core.progress import Progress, no_progress
from harts_core.trees.rollout_tree import RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The loss of a step whose gradients have been accumulated.

    Attributes:
        loss: sum of the units' contributions.
        grad_norm: global norm of the accumulated gradients.
        metrics: the objective's metrics, means over the step, and the router's.
        counts: what was executed.
        expert_counts: int64 [layers with experts, experts], original tokens that each expert got; None
            without experts.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    counts: ExecutionCounts
    expert_counts: Tensor | None


class Trainer:
    """Trains a model on plans.

    Args:
        model: the model; its device and dtype are used.
        objective: the loss.
        optimizer: over the model's parameters; its configuration also has the rate of the experts' bias.
        recompute: activations to compute again in the backward passes: none, of layers, of whole units.
        head_block_rows: rows of vocabulary logits held at a time.
        linear_calls: how linear attention is cut into packed calls: the plan's ``rounds``, or a comparison.
        router: weights of the router's losses.
        steps_done: optimizer steps already taken (a resumed run).
        ranks: the processes that share the step.
        cache: how blocks are kept that units import from earlier ones.
    """

    def __init__(
        self,
        model: HybridModel,
        objective: Objective,
        optimizer: StepOptimizer,
        *,
        recompute: Recompute = "none",
        head_block_rows: int = 1024,
        linear_calls: LinearCalls = "rounds",
        router: RouterTerms = RouterTerms(),
        steps_done: int = 0,
        ranks: Ranks = ONE_PROCESS,
        cache: CacheSettings = CacheSettings(),
    ) -> None:
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.recompute = recompute
        self.head_block_rows = head_block_rows
        self.linear_calls = linear_calls
        self.router = router
        self.steps_done = steps_done
        self.ranks = ranks
        self.cache = cache

    def prepare(self, bundle: PlanBundle, tree: RolloutTree) -> StepData:
        """Validate a plan and join it with its tree, once for any number of steps on it.

        Raises:
            InvalidPlanError, DataError: see ``build_step_data``.
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
        if result.expert_counts is not None:
            bias_rate = self.optimizer.config.expert_bias_rate
            update_expert_bias(self.model.expert_biases, result.expert_counts, bias_rate)
        self.steps_done += 1
        seconds = time.perf_counter() - start
        cache = result.counts.cache
        return StepMetrics(
            step=self.steps_done,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=rate,
            original_tokens=data.original_tokens,
            compact_tokens=int(data.bundle.units.computed_tokens[list(data.units)].sum()),
            trained_positions=data.totals.tokens,
            units=len(data.units),
            rounds=data.rounds,
            interface_bytes=cache.peak_bytes,
            cache_allocated_bytes=cache.allocated_bytes,
            cache_hit_rate=cache.hit_rate,
            cache_offloaded_bytes=cache.offloaded_bytes,
            cache_over_budget_bytes=cache.over_budget_bytes,
            seconds=seconds,
            tokens_per_s=data.original_tokens / seconds,
            objective=result.metrics,
        )

    def backward(self, data: StepData, progress: Progress = no_progress) -> StepLoss:
        """Accumulate the gradients of a step in the optimizer, without an update.

        Raises:
            NonFiniteError: as ``step_on``; all gradients are forgotten.
        """
        self.optimizer.zero_grad()
        sums = StepSums()
        work = self.ranks.work(data.bundle, data.units)
        router = StepRouter.begin(
            self.model,
            data,
            work,
            self.router,
            linear_calls=self.linear_calls,
            ranks=self.ranks,
            cache=self.cache,
        )
        executor = UnitExecutor(
            self.model,
            work.bundle,
            data.tree,
            lambda forward: self._loss(data, forward, sums, router),
            work.events(),
            recompute=self.recompute,
            linear_calls=self.linear_calls,
            links=work.links,
            lockstep=work.lockstep,
            cache=self.cache,
            transfers=work.transfers,
        )
        done = 0
        progress("units", done, work.num_units)
        for event in executor.events:
            self.ranks.at(f"step {self.steps_done + 1}, {event.kind} of unit {event.unit}")
            executor.run(event)
            if event.kind == "backward":
                done += 1
                progress("units", done, work.num_units)
                if not math.isfinite(self.optimizer.grad_norm()):
                    raise self._not_finite(data, event.unit, "a gradient")
        self.ranks.at(f"step {self.steps_done + 1}, the sums over the ranks")
        norm = self.ranks.finish_gradients(self.optimizer)
        total = self.ranks.sum_step(sums)
        routed = self.ranks.sum_router(router.sums, self.model.routed_shape)
        return StepLoss(
            loss=total.loss,
            grad_norm=norm,
            metrics=self.ranks.router_metrics(routed) | total.means(),
            counts=executor.counts,
            expert_counts=None if routed is None else routed.counts,
        )

    def logprobs(self, layout: UnitLayout) -> Tensor:
        """λ of the trained positions of a unit without imports, by (row, position), differentiable."""
        hidden = unit_hidden(self.model, layout, recompute=self.recompute)
        return unit_logprobs(self.model, hidden, layout, block_rows=self.head_block_rows)

    def _loss(
        self, data: StepData, forward: UnitForward, sums: StepSums, router: StepRouter
    ) -> Tensor | None:
        """One unit's contribution to the step's loss; None where it has none."""
        objective, routed = self._objective_loss(data, forward, sums), router.loss(forward)
        terms = [part for part in (objective, routed) if part is not None]
        if not terms:
            return None
        loss = torch.stack(terms).sum()
        if not math.isfinite(float(loss.detach())):
            raise self._not_finite(data, forward.layout.unit, "the loss")
        sums.objective_loss += 0.0 if objective is None else float(objective.detach())
        sums.router_loss += 0.0 if routed is None else float(routed.detach())
        return loss

    def _objective_loss(self, data: StepData, forward: UnitForward, sums: StepSums) -> Tensor | None:
        """The objective's part; None without trained positions, and before the last stage of a pipeline."""
        if not self.model.spec.stage.is_last or not len(forward.layout.trained_row):
            return None
        head = unit_head(
            self.model,
            forward.hidden,
            forward.layout,
            block_rows=self.head_block_rows,
            imported_hidden=forward.imported_hidden,
            entropy=needs_entropy(self.objective),
        )
        output = self.objective(data.batch(forward.layout, head.logprobs, head.entropy))
        for name, metric in output.metrics.items():
            sums.add_metric(name, float(metric.total), float(metric.count))
        return output.loss

    def _not_finite(self, data: StepData, unit: int, what: str) -> NonFiniteError:
        """The error, after forgetting all gradients."""
        self.optimizer.zero_grad()
        rank = f"{self.ranks.name}, " if self.ranks.name else ""
        return NonFiniteError(
            f"{what} is not finite; nothing was updated",
            where=f"{rank}step {self.steps_done + 1}, unit {unit}{_some_rows(data, unit)}",
            hint="look at these rows' log-probs and advantages; lower the learning rate",
        )


def _some_rows(data: StepData, unit: int, shown: int = 5) -> str:
    rows = data.bundle.assignments.row[data.bundle.assignments.unit == unit].tolist()
    more = ", …" if len(rows) > shown else ""
    return f", rows {', '.join(map(str, rows[:shown]))}{more}" if rows else ""
