"""Every built-in objective against its formula, written as loops over trajectories and positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harts_core.errors import ConfigError, ExecError
from harts_core.exec.config import ObjectiveSection, OptimizerSection
from harts_core.exec.model.config import PRESETS
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import (
    OBJECTIVES,
    Cispo,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Objective,
    Ppo,
    Reinforce,
    build_objective,
    needs_entropy,
)
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from tests.numerics.test_objectives import GROUPS, LENGTHS, batch_of, step_values
from tests.support_train import random_tree
from tests.support_windows import chain_bundle

SPLITS = ([[0, 1, 2, 3, 4]], [[0, 3], [1, 2, 4]], [[4], [2], [0], [1], [3]])
Values = dict[str, list[np.ndarray]]
Term = Callable[[Any, float, float, float, float], float]
"""(objective, λ, λ_old, A, ratio of the trajectory) → policy_t."""


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, 1 - low), 1 + high)


def surrogate(o: Any, lam: float, old: float, adv: float, _: float) -> float:
    r = math.exp(lam - old)
    return -min(r * adv, clip(r, o.clip_low, o.clip_high) * adv)


def dual(o: Any, lam: float, old: float, adv: float, s: float) -> float:
    gain = -surrogate(o, lam, old, adv, s)
    return -max(gain, o.dual_clip * adv) if adv < 0 and o.dual_clip else -gain


def sequence_surrogate(o: Any, lam: float, old: float, adv: float, s: float) -> float:
    return -min(s * adv, clip(s, o.clip_low, o.clip_high) * adv)


def truncated_score(o: Any, lam: float, old: float, adv: float, _: float) -> float:
    return -clip(math.exp(lam - old), o.clip_low, o.clip_high) * adv * lam


CASES: dict[str, tuple[Any, Term]] = {
    "grpo": (Grpo(), surrogate),
    "grpo, token": (Grpo(normalise="token", clip_low=0.1), surrogate),
    "grpo, group": (Grpo(normalise="group"), surrogate),
    "dr_grpo": (DrGrpo(max_tokens=8), surrogate),
    "dapo": (Dapo(), surrogate),
    "ppo": (Ppo(), dual),
    "ppo, dual clip": (Ppo(dual_clip=1.5), dual),
    "gspo": (Gspo(clip_low=0.1, clip_high=0.2), sequence_surrogate),
    "gspo, token": (Gspo(normalise="token"), sequence_surrogate),
    "cispo": (Cispo(), truncated_score),
    "cispo, both sides": (Cispo(clip_low=0.2, clip_high=0.3, normalise="sequence"), truncated_score),
    "reinforce": (Reinforce(), lambda o, lam, old, adv, s: -adv * lam),
    "k1": (Grpo(kl_coef=0.3, kl="k1"), surrogate),
    "k2": (Dapo(kl_coef=0.3, kl="k2"), surrogate),
    "k3": (Reinforce(kl_coef=0.3), lambda o, lam, old, adv, s: -adv * lam),
    "entropy": (Ppo(entropy_coef=0.2, kl_coef=0.1), dual),
}


def plain_loss(o: Any, term: Term, values: Values) -> float:
    """The step's loss, one position at a time."""
    total = 0.0
    for row, length in enumerate(LENGTHS):
        lams, olds = values["logprobs"][row], values["old_logprobs"][row]
        ratio = math.exp(sum(lams - olds) / length)
        for t in range(length):
            lam, ref = float(lams[t]), float(values["ref_logprobs"][row][t])
            loss = term(o, lam, float(olds[t]), float(values["advantages"][row][t]), ratio)
            d = lam - ref
            loss += o.kl_coef * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[o.kl]
            loss -= o.entropy_coef * float(values["entropy"][row][t])
            total += weight(o, row) * loss
    return total


def weight(o: Any, row: int) -> float:
    if isinstance(o, DrGrpo):
        return 1 / len(LENGTHS) / o.max_tokens
    if o.normalise == "token":
        return 1 / sum(LENGTHS)
    if o.normalise == "sequence":
        return 1 / len(LENGTHS) / LENGTHS[row]
    mates = [n for n, g in zip(LENGTHS, GROUPS, strict=True) if g == GROUPS[row]]
    return 1 / len(set(GROUPS)) / sum(mates)


def values_with_entropy(rng: np.random.Generator) -> Values:
    return step_values(rng) | {"entropy": [rng.random(n) * 3 for n in LENGTHS]}


def gradients(o: Objective, values: Values, rows: list[int]) -> list[np.ndarray]:
    """∂loss/∂λ of each row of a batch."""
    batch = batch_of(values, rows)
    o(batch).loss.backward()
    assert batch.logprobs.grad is not None
    lengths = np.cumsum([LENGTHS[r] for r in rows])[:-1]
    return np.split(batch.logprobs.grad.numpy(), lengths)


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_the_plain_formula_however_the_step_is_split(
    name: str, rng: np.random.Generator
) -> None:
    objective, term = CASES[name]
    values = values_with_entropy(rng)
    expected = plain_loss(objective, term, values)
    for split in SPLITS:
        loss = sum(objective(batch_of(values, rows)).loss.item() for rows in split)
        assert loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_finite_differences(name: str, rng: np.random.Generator) -> None:
    objective, term = CASES[name]
    values = values_with_entropy(rng)
    if isinstance(objective, Cispo):  # the weight of the score is held fixed
        expected = [
            [
                -clip(math.exp(lam - old), objective.clip_low, objective.clip_high)
                * adv
                * weight(objective, r)
                for lam, old, adv in zip(
                    *(values[k][r] for k in ("logprobs", "old_logprobs", "advantages")), strict=True
                )
            ]
            for r in range(len(LENGTHS))
        ]
    else:
        expected = []
        for row, length in enumerate(LENGTHS):
            slopes = []
            for t in range(length):
                ends = []
                for step in (1e-6, -1e-6):
                    values["logprobs"][row][t] += step
                    ends.append(plain_loss(objective, term, values))
                    values["logprobs"][row][t] -= step
                slopes.append((ends[0] - ends[1]) / 2e-6)
            expected.append(slopes)
    for split in SPLITS[:2]:
        for rows in split:
            for row, gradient in zip(rows, gradients(objective, values, rows), strict=True):
                assert gradient.tolist() == pytest.approx(expected[row], abs=1e-8)


def test_the_entropy_bonus_reaches_the_entropies(rng: np.random.Generator) -> None:
    objective = Dapo(entropy_coef=0.25)
    assert needs_entropy(objective)
    assert not needs_entropy(Dapo())
    batch = batch_of(values_with_entropy(rng), [0, 1, 2, 3, 4])
    assert batch.entropy is not None
    batch.entropy.requires_grad_()
    output = objective(batch)
    output.loss.backward()
    assert batch.entropy.grad is not None
    assert batch.entropy.grad.tolist() == pytest.approx([-0.25 / sum(LENGTHS)] * sum(LENGTHS))
    mean = float(output.metrics["entropy"].total) / float(output.metrics["entropy"].count)
    assert mean == pytest.approx(float(batch.entropy.detach().mean()))


def test_defaults_are_the_documented_ones() -> None:
    assert set(OBJECTIVES) == {"grpo", "dr_grpo", "dapo", "ppo", "gspo", "cispo", "reinforce"}
    assert (Grpo().normalise, Grpo().clip_high) == ("sequence", 0.2)
    assert (Dapo().normalise, Dapo().clip_low, Dapo().clip_high) == ("token", 0.2, 0.28)
    assert (Gspo().clip_low, Gspo().clip_high) == (3e-4, 4e-4)
    assert Reinforce().columns == ("advantages",)
    assert Reinforce(kl_coef=0.1).columns == ("advantages", "ref_logprobs")


def test_dual_clip_bounds_the_loss_of_bad_tokens(rng: np.random.Generator) -> None:
    values = step_values(rng)
    values["logprobs"][0][0], values["old_logprobs"][0][0], values["advantages"][0][0] = -0.1, -8.0, -1.0
    output = Ppo(dual_clip=3.0)(batch_of(values, [0, 1, 2, 3, 4]))
    assert float(output.metrics["dual_clip_fraction"].total) >= 1
    batch = batch_of(values, [0])
    Ppo(dual_clip=3.0)(batch).loss.backward()
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad[0] == 0


def test_gspo_refuses_a_split_trajectory(rng: np.random.Generator) -> None:
    values = step_values(rng)
    batch = batch_of(values, [0, 2])
    longer = torch.tensor([float(LENGTHS[0]), LENGTHS[2] + 1.0], dtype=torch.float64)
    with pytest.raises(ExecError, match="gspo couples all positions") as caught:
        Gspo()(replace(batch, sequence_tokens=longer))
    assert "row 2" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dr_grpo", {}, "[objective] max_tokens is required"),
        ("dr_grpo", {"max_tokens": 0}, "max_tokens must be at least 1"),
        ("dr_grpo", {"max_tokens": 8, "normalise": "group"}, "max_tokens normalises"),
        ("ppo", {"dual_clip": 0.5}, "dual_clip must be above 1"),
        ("gspo", {"clip_low": -0.1}, "clip_low must be in [0, 1]"),
        ("cispo", {"clip_high": -1.0}, "clip_high must not be negative"),
        ("dapo", {"kl": "k4"}, "must be one of k1, k2, k3"),
        ("reinforce", {"entropy_coef": -0.1}, "entropy_coef must not be negative"),
        ("reinforce", {"clip_low": 0.1}, "unknown key clip_low"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_objective(ObjectiveSection(name=name, options=options))
    assert message in str(caught.value)


def test_gspo_refuses_a_plan_that_splits_trajectories() -> None:
    tree = random_tree(4)
    model = HybridModel(replace(PRESETS["cpu-dense"], vocab_size=200), dtype=torch.float32, seed=0)
    trainer = Trainer(model, Gspo(), Optimizer(model.named_parameters(), OptimizerSection()))
    with pytest.raises(ExecError, match="the plan splits trajectories"):
        trainer.step(chain_bundle(tree, units=3, chunk=4), tree)
    assert trainer.steps_done == 0
