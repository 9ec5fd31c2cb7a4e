"""Router losses, load statistics and bias updates of whole steps against trajectory-by-trajectory training.

The reference runs every trajectory alone with the plain model of tests/support_model.py and takes the terms
over all its tokens. Loss, every gradient and every statistic must agree to 1e-10 in float64, whatever the
plan shares, with and without recomputation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from harts_core.errors import NonFiniteError
from harts_core.exec.config import OptimizerSection
from harts_core.exec.model.moe_losses import RouterTerms
from harts_core.exec.objectives import Objective, ObjectiveBatch, ObjectiveOutput
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from harts_core.plan.bundle import PRODUCER, PlanBundle
from harts_core.trees.rollout_tree import RolloutTree
from tests.numerics.test_parity import CONFIGS, VOCAB
from tests.numerics.test_windows import Weighted, weighted_tree
from tests.support import tree_from_sequences
from tests.support_model import (
    lively_model,
    model_weights,
    reference_hidden,
    reference_logprobs,
    simple_bundle,
)
from tests.support_windows import chain_bundle, nested_bundle, window_bundle

TREE = "random-1"
TERMS = RouterTerms(z_loss_coef=0.03, balance_loss_coef=0.5)
CONFIG = CONFIGS["moe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    loss: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]
    counts: list[list[int]]


@functools.cache
def reference(tree_name: str) -> Expected:
    """The step on S tokens, every trajectory by itself."""
    tree = weighted_tree(tree_name)
    model = lively_model(CONFIG, torch.float64)
    routers: list[list[tuple[Tensor, list[list[int]]]]] = []
    logprobs = reference_logprobs(CONFIG, model_weights(model), tree, routers)
    loss = torch.zeros((), dtype=torch.float64)
    assert tree.advantages is not None
    for row, p in enumerate(logprobs):
        loss = loss + (torch.tensor(tree.advantages[row], dtype=p.dtype) * p + p.tanh()).sum()
    S, E, k = tree.original_tokens, CONFIG.num_experts, CONFIG.num_experts_per_tok
    counts, z_losses, balances = [], [], []
    for layer in range(len(routers[0])):
        logits = torch.cat([routing[layer][0] for routing in routers])
        chosen = [experts for routing in routers for experts in routing[layer][1]]
        assert len(logits) == len(chosen) == S
        counts.append([sum(e in experts for experts in chosen) for e in range(E)])
        probability = torch.sigmoid(logits) / torch.sigmoid(logits).sum(-1, keepdim=True)
        share = torch.tensor(counts[-1], dtype=torch.float64) / (k * S)
        z_losses.append((logits.exp().sum(-1).log() ** 2).mean())
        balances.append(E * (share * probability.mean(0)).sum())
    for z_loss, balance in zip(z_losses, balances, strict=True):
        loss = loss + TERMS.z_loss_coef * z_loss + TERMS.balance_loss_coef * balance
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    loads = [c * E / (k * S) for layer in counts for c in layer]
    return Expected(
        loss=loss.item(),
        gradients={n: g for n, g in zip(parameters, found, strict=True) if g is not None},
        metrics={
            "router_z_loss": sum(z.item() for z in z_losses) / len(z_losses),
            "balance_loss": sum(b.item() for b in balances) / len(balances),
            "expert_load_max": max(loads),
            "expert_load_min": min(loads),
            "experts_idle": float(loads.count(0)),
        },
        counts=counts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaximalEntropy:
    """−H, a mean over the trained positions; with an unused λ."""

    columns = ()
    needs_entropy = True

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveOutput:
        assert batch.entropy is not None
        return ObjectiveOutput(loss=-(batch.weights("token") * batch.entropy).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitate:
    """−λ, a mean over the trained positions."""

    columns = ()

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveOutput:
        return ObjectiveOutput(loss=-(batch.weights("token") * batch.logprobs).sum())


def plan(kind: str, tree: RolloutTree) -> PlanBundle:
    match kind:
        case "expanded":
            return simple_bundle(tree, sharing="none", units=3)
        case "shared":
            return simple_bundle(tree, units=2)
        case "window":
            return window_bundle(tree, chunk=4, consumers=3, seed=8)
        case "nested":
            return nested_bundle(tree, dp=2, slots=2, levels=2, chunk=4, seed=2)
        case _:
            return chain_bundle(tree, units=4, chunk=4)


def make_trainer(
    objective: Objective, terms: RouterTerms = TERMS, *, recompute: str = "none", bias_rate: float = 0.0
) -> Trainer:
    model = lively_model(CONFIG, torch.float64)
    optimizer = Optimizer(model.named_parameters(), OptimizerSection(expert_bias_rate=bias_rate))
    return Trainer(model, objective, optimizer, router=terms, recompute=recompute)  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["none", "layer", "unit"])
@pytest.mark.parametrize("kind", ["expanded", "shared", "window", "nested", "chain"])
def test_every_plan_gives_the_losses_gradients_and_statistics(kind: str, recompute: str) -> None:
    tree = weighted_tree(TREE)
    bundle = plan(kind, tree)
    if kind in ("window", "nested"):
        assert (bundle.units.kind == PRODUCER).any()
    trainer = make_trainer(Weighted(), recompute=recompute)
    result = trainer.backward(trainer.prepare(bundle, tree))
    expected = reference(TREE)
    assert result.loss == pytest.approx(expected.loss, rel=1e-10)
    assert result.expert_counts is not None
    assert result.expert_counts.tolist() == expected.counts
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-10)
    found = trainer.optimizer.gradients()
    for name, gradient in expected.gradients.items():
        assert (found[name] - gradient).abs().max() <= 1e-10 * gradient.abs().max(), name


@pytest.mark.parametrize("kind", ["expanded", "nested"])
def test_bias_updates(kind: str) -> None:
    tree = weighted_tree(TREE)
    trainer = make_trainer(Weighted(), RouterTerms(), bias_rate=0.01)
    before = [bias.clone() for bias in trainer.model.expert_biases]
    trainer.step(plan(kind, tree), tree)
    moved = 0
    for old, new, loads in zip(before, trainer.model.expert_biases, reference(TREE).counts, strict=True):
        mean = sum(loads) / len(loads)
        for e, load in enumerate(loads):
            change = 0.01 if load < mean else -0.01 if load > mean else 0.0
            assert new[e].item() == pytest.approx(old[e].item() + change, abs=1e-15)
            moved += change != 0
    assert moved


def test_without_a_rate_the_bias_stays() -> None:
    tree = weighted_tree(TREE)
    trainer = make_trainer(Weighted())
    before = [bias.clone() for bias in trainer.model.expert_biases]
    trainer.step(plan("shared", tree), tree)
    assert all(map(torch.equal, before, trainer.model.expert_biases))


def test_units_without_trained_positions_count_too() -> None:
    tree = tree_from_sequences([[1, 2, 3, 4], [5], [6]], vocab=VOCAB)
    assert tree.trained_counts.tolist() == [3, 0, 0]
    trainer = make_trainer(Imitate())
    result = trainer.backward(trainer.prepare(simple_bundle(tree, units=3), tree))
    assert result.expert_counts is not None
    assert result.expert_counts.sum(-1).tolist() == [tree.original_tokens * CONFIG.num_experts_per_tok] * 3


def test_a_dense_model_has_no_router_metrics() -> None:
    tree = weighted_tree(TREE)
    model = lively_model(CONFIGS["dense"], torch.float64)
    optimizer = Optimizer(model.named_parameters(), OptimizerSection(expert_bias_rate=0.1))
    trainer = Trainer(model, Weighted(), optimizer, router=TERMS)
    result = trainer.backward(trainer.prepare(plan("shared", tree), tree))
    assert result.metrics == {}
    assert result.expert_counts is None
    trainer.step(plan("shared", tree), tree)


def test_a_step_that_is_not_finite_moves_no_bias() -> None:
    tree = weighted_tree(TREE)
    trainer = make_trainer(Weighted(), RouterTerms(z_loss_coef=1e308), bias_rate=0.1)
    before = [bias.clone() for bias in trainer.model.expert_biases]
    with torch.no_grad():
        trainer.model.model.layers[1].mlp.gate.weight.mul_(1e4)  # type: ignore[union-attr]
    with pytest.raises(NonFiniteError):
        trainer.step(plan("shared", tree), tree)
    assert all(map(torch.equal, before, trainer.model.expert_biases))


def test_entropy_bonus_of_a_step() -> None:
    """Entropies through the trainer against softmax over the whole vocabulary, trajectory by trajectory."""
    tree = weighted_tree(TREE)
    trainer = make_trainer(MaximalEntropy(), RouterTerms())
    loss = trainer.backward(trainer.prepare(plan("nested", tree), tree)).loss
    model = lively_model(CONFIG, torch.float64)
    weights = model_weights(model)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(tree.num_rows):
        tokens = torch.tensor(tree.tokens(row).astype("int64"))
        logp = torch.log_softmax(
            reference_hidden(CONFIG, weights, tokens) @ weights["lm_head.weight"].t(), dim=-1
        )
        trained = torch.tensor(tree.trained_positions(row).astype("int64"))
        total = total + (logp.exp() * logp).sum(-1)[trained - 1].sum() / int(tree.trained_counts.sum())
    assert loss == pytest.approx(total.item(), rel=1e-10)
    parameters = dict(model.named_parameters())
    want = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    found = trainer.optimizer.gradients()
    for name, gradient in zip(parameters, want, strict=True):
        if gradient is not None:
            assert (found[name] - gradient).abs().max() <= 1e-10 * gradient.abs().max(), name
