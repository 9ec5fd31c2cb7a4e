"""One training step as a case that any number of processes can run, and what is compared of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harts_core.exec.config import Dtype, OptimizerSection, ParallelSection
from harts_core.exec.logprob import plan_logprobs
from harts_core.exec.model.config import PRESETS, ModelConfig
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.model.moe_losses import RouterTerms
from harts_core.exec.objectives import Grpo
from harts_core.exec.optimizer import parameter_of
from harts_core.exec.parallel.job import ALONE, Job
from harts_core.exec.trainer import Trainer
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.rollout_tree import RolloutTree
from tests.support_model import lively_model, model_weights
from tests.support_train import plan_of, random_tree
from tests.support_windows import nested_bundle

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "head_dim": 8,
    "q_lora_rank": 12,
}

CONFIGS: dict[str, ModelConfig] = {
    "moe": replace(PRESETS["cpu-moe"], **SMALL),
    "dense": replace(PRESETS["cpu-dense"], **SMALL),
}

OPTIMIZER = OptimizerSection(learning_rate=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step.

    Attributes:
        parallel: the ``[parallel]`` table.
        replicas: D of the plan.
        levels: nested levels of windows; 0: no sharing across microbatches.
        slots: microbatches of each replica.
        chain: a plan of psRL's instead: consumers that import from the consumers before them.
        steps: updates behind the step whose gradients are compared.
    """

    parallel: dict[str, Any]
    model: str = "moe"
    dtype: Dtype = "float64"
    replicas: int = 2
    levels: int = 2
    slots: int = 2
    chain: bool = False
    recompute: str = "layer"
    seed: int = 0
    optimizer: OptimizerSection = OPTIMIZER
    steps: int = 0

    @property
    def section(self) -> ParallelSection:
        return ParallelSection(**self.parallel)

    @property
    def num_processes(self) -> int:
        return self.section.num_processes


@dataclass(slots=True, kw_only=True)
class Result:
    """What must not depend on the number of processes."""

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    expert_counts: Tensor | None
    logprobs: npt.NDArray[np.float64]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    state_bytes: list[int] = field(default_factory=list)


def inputs(case: Case) -> tuple[RolloutTree, PlanBundle]:
    tree = random_tree(case.seed, num_rows=max(9, case.slots * case.replicas), max_extend=14)
    if case.chain:
        capacity = int(tree.length.max()) // 2
        options = PlanOptions(
            dp=case.replicas, capacity=capacity, planner="psrl", chunk=4, on_too_long="split", seed=case.seed
        )
        return tree, plan_tree(tree, options)
    if not case.levels:
        return tree, plan_of(tree, dp=case.replicas, slots=case.slots)
    bundle = nested_bundle(
        tree, dp=case.replicas, slots=case.slots, levels=case.levels, chunk=16, seed=case.seed
    )
    return tree, bundle


def build_trainer(case: Case, job: Job = ALONE) -> Trainer:
    """The same weights for every job: each rank takes its part of the whole model's. Below float64
    they are those of a new model: the lively one amplifies rounding."""
    config, dtype = CONFIGS[case.model], getattr(torch, case.dtype)
    fresh = None if dtype == torch.float64 else HybridModel(config, dtype=dtype, seed=5)
    whole = model_weights(lively_model(config, dtype) if fresh is None else fresh)
    model = HybridModel(config, dtype=dtype, spec=job.spec, seed=None)
    with torch.no_grad():
        for name, tensor in model_weights(model).items():
            tensor.copy_(job.spec.shard_of(tensor).own_part(whole[name]))
    return Trainer(
        model,
        Grpo(kl_coef=0.1, entropy_coef=0.05),
        job.optimizer(model, case.optimizer, sharded=case.section.shares_optimizer(case.dtype)),
        recompute=case.recompute,  # type: ignore[arg-type]
        head_block_rows=7,
        router=RouterTerms(z_loss_coef=0.03, balance_loss_coef=0.5),
        ranks=job.ranks,
    )


def run(case: Case, trainer: Trainer) -> Result:
    """The case on a trainer's rank: a forward-only pass, and a step without its update."""
    tree, bundle = inputs(case)
    logprobs = plan_logprobs(trainer.model, bundle, tree, head_block_rows=7, ranks=trainer.ranks)
    step = trainer.backward(trainer.prepare(bundle, tree))
    return Result(
        loss=step.loss,
        grad_norm=step.grad_norm,
        metrics=step.metrics,
        expert_counts=step.expert_counts,
        logprobs=logprobs,
    )


def update(case: Case, trainer: Trainer, job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The case's updates; the weights and the optimizer's state behind them, whole, on rank 0."""
    tree, bundle = inputs(case)
    data = trainer.prepare(bundle, tree)
    for _ in range(case.steps):
        trainer.step_on(data)
    parameters = dict(trainer.optimizer.parameters())
    weights = job.collect((name, p.detach().clone(), p) for name, p in parameters.items())
    state = job.collect((n, t, parameters[parameter_of(n)]) for n, t in trainer.optimizer.named_state())
    return weights, state


def held_bytes(trainer: Trainer) -> int:
    """Of the optimizer's state on this rank, by the memory that its tensors keep alive."""
    optimizer = trainer.optimizer
    held = [optimizer.state_shard(*name).values.untyped_storage() for name in optimizer.state_names()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held if storage.nbytes()}.values())


def run_alone(case: Case) -> Result:
    """The case in this process."""
    trainer = build_trainer(case)
    result = run(case, trainer)
    found = {name: trainer.optimizer.gradient(name).clone() for name, _ in trainer.optimizer.parameters()}
    result.gradients = found
    if case.steps:
        result.weights, result.state = update(case, trainer, ALONE)
        result.state_bytes = [held_bytes(trainer)]
    return result
