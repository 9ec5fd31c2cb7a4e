"""Training steps on different plans of the same rollouts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from harts_core.errors import CorruptFileError, NonFiniteError
from harts_core.exec.config import OptimizerSection
from harts_core.exec.metrics import MetricsLog
from harts_core.exec.model.config import PRESETS, ModelConfig
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import Grpo, Objective, ObjectiveBatch, ObjectiveOutput
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from tests.support_train import plan_of, random_tree

TINY = ModelConfig.from_dict(
    PRESETS["cpu-moe"].to_dict() | {"num_hidden_layers": 2, "layer_group_size": 2, "vocab_size": 200}
)
PLANS = {
    "one unit": {},
    "expanded, one unit": {"sharing": "none"},
    "two replicas": {"dp": 2, "slots": 3},
    "expanded, two replicas": {"sharing": "none", "dp": 2, "slots": 2},
}


def make_trainer(
    dtype: torch.dtype = torch.float64, objective: Objective | None = None, **options: float
) -> Trainer:
    model = HybridModel(TINY, dtype=dtype, seed=5)
    optimizer = Optimizer(
        model.named_parameters(),
        OptimizerSection(**{"learning_rate": 1e-3} | options),  # type: ignore[arg-type]
    )
    return Trainer(model, objective or Grpo(kl_coef=0.1, normalise="sequence"), optimizer)


@pytest.mark.parametrize("normalise", ["token", "sequence", "group"])
def test_no_plan_changes_the_loss_the_metrics_or_a_gradient(normalise: str) -> None:
    tree = random_tree(7)
    results = {}
    for name, options in PLANS.items():
        trainer = make_trainer(objective=Grpo(kl_coef=0.1, normalise=normalise))  # type: ignore[arg-type]
        loss = trainer.backward(trainer.prepare(plan_of(tree, **options), tree))  # type: ignore[arg-type]
        results[name] = (loss, {n: g.clone() for n, g in trainer.optimizer.gradients().items()})
    expected, gradients = results["expanded, one unit"]
    assert len(gradients) == len(list(make_trainer().model.parameters()))
    for name, (loss, found) in results.items():
        assert loss.loss == pytest.approx(expected.loss, rel=1e-11), name
        assert loss.grad_norm == pytest.approx(expected.grad_norm, rel=1e-10), name
        assert loss.metrics == pytest.approx(expected.metrics, rel=1e-10), name
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-9, atol=1e-13, msg=f"{name}: {key}")


def test_shared_and_expanded_plans_train_alike() -> None:
    tree = random_tree(8)
    losses = []
    for options in ({}, {"sharing": "none", "slots": 2}):
        trainer = make_trainer(torch.float32)
        bundle = plan_of(tree, **options)  # type: ignore[arg-type]
        losses.append([trainer.step(bundle, tree).loss for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
    assert losses[0][-1] < losses[0][0]  # it learns


def test_step_metrics(tmp_path: Path) -> None:
    tree = random_tree(7)
    bundle = plan_of(tree, dp=2, slots=2)
    trainer = make_trainer()
    calls: list[tuple[str, int, int | None]] = []
    metrics = trainer.step(bundle, tree, lambda *call: calls.append(call))
    assert metrics.rounds == bundle.metrics["num_rounds"]
    assert metrics.step == 1
    assert metrics.original_tokens == tree.original_tokens
    assert metrics.compact_tokens == int(bundle.units.computed_tokens.sum()) < tree.original_tokens
    assert metrics.trained_positions == tree.trained_counts.sum()
    assert metrics.units == 4
    assert metrics.lr == 1e-3
    assert metrics.tokens_per_s == pytest.approx(metrics.original_tokens / metrics.seconds)
    own = {"ratio", "clip_fraction", "kl_old", "kl_ref", "logprob"}
    router = {"router_z_loss", "balance_loss", "expert_load_max", "expert_load_min", "experts_idle"}
    assert metrics.objective.keys() == own | router
    assert calls[-1] == ("units", 4, 4)

    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(metrics)
    log.append(trainer.step(bundle, tree))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2]
    assert records[0]["kl_ref"] == metrics.objective["kl_ref"]
    endless = replace(metrics, objective={"kl_old": float("inf"), "ratio": 1.0})
    assert endless.to_dict()["kl_old"] is None
    assert endless.to_dict()["ratio"] == 1.0
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 3, "los')  # a killed process
    MetricsLog(tmp_path / "metrics.jsonl", after_step=1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(CorruptFileError, match=r"metrics\.jsonl, line 1"):
        MetricsLog(tmp_path / "metrics.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """Breaks the loss or the gradient of the unit that holds one row."""

    row: int
    gradient_only: bool = False
    columns = ()

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveOutput:
        loss = (batch.weights("token") * batch.logprobs).sum()
        if self.row in batch.rows.tolist():
            bad = (batch.logprobs[0] - batch.logprobs[0].detach()).sqrt()  # 0 with slope infinity
            loss = loss + (bad if self.gradient_only else bad / 0)
        return ObjectiveOutput(loss=loss)


@pytest.mark.parametrize("gradient_only", [False, True])
def test_a_loss_or_gradient_that_is_not_finite_updates_nothing(gradient_only: bool) -> None:
    tree = random_tree(7, num_rows=8)
    bundle = plan_of(tree, slots=3)
    row = int(tree.trained_counts.nonzero()[0][-1])
    trainer = make_trainer(objective=Poison(row=row, gradient_only=gradient_only))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    unit = int(bundle.assignments.unit[bundle.assignments.row == row][0])
    with pytest.raises(NonFiniteError, match="gradient" if gradient_only else "loss") as caught:
        trainer.step(bundle, tree)
    assert f"unit {unit}" in str(caught.value)
    assert trainer.steps_done == 0
    assert not trainer.optimizer.gradients()
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())


def test_recompute_gives_the_same_bits() -> None:
    tree = random_tree(9)
    gradients = []
    for mode in ("none", "layer"):
        trainer = make_trainer(torch.float32)
        trainer.recompute = mode  # type: ignore[assignment]
        trainer.backward(trainer.prepare(plan_of(tree), tree))
        gradients.append({n: g.clone() for n, g in trainer.optimizer.gradients().items()})
    assert all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items())
