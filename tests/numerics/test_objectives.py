"""Objectives against their formulas written as plain loops over trajectories."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from harts_core.errors import ConfigError
from harts_core.exec.config import ObjectiveSection
from harts_core.exec.objectives import (
    Grpo,
    ObjectiveBatch,
    ObjectiveOutput,
    StepTotals,
    build_objective,
)

LENGTHS = [3, 1, 5, 2, 4]
GROUPS = [0, 0, 1, 1, 2]


def step_values(rng: np.random.Generator) -> dict[str, list[np.ndarray]]:
    """Per-trajectory arrays of a whole step."""
    return {
        "logprobs": [-rng.random(n) * 2 for n in LENGTHS],
        "old_logprobs": [-rng.random(n) * 2 for n in LENGTHS],
        "ref_logprobs": [-rng.random(n) * 2 for n in LENGTHS],
        "advantages": [rng.standard_normal(n) for n in LENGTHS],
    }


def batch_of(values: dict[str, list[np.ndarray]], rows: list[int]) -> ObjectiveBatch:
    flat = {k: torch.tensor(np.concatenate([v[r] for r in rows])) for k, v in values.items()}
    flat["logprobs"].requires_grad_()
    tokens = {g: sum(n for n, h in zip(LENGTHS, GROUPS, strict=True) if h == g) for g in set(GROUPS)}
    return ObjectiveBatch(
        **flat,
        sequence=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([LENGTHS[r] for r in rows])),
        rows=torch.tensor(rows),
        group=torch.tensor([GROUPS[r] for r in rows]),
        sequence_tokens=torch.tensor([float(LENGTHS[r]) for r in rows], dtype=torch.float64),
        group_tokens=torch.tensor([float(tokens[GROUPS[r]]) for r in rows], dtype=torch.float64),
        group_sequences=torch.tensor([float(GROUPS.count(GROUPS[r])) for r in rows], dtype=torch.float64),
        totals=StepTotals(tokens=sum(LENGTHS), sequences=len(LENGTHS), groups=len(set(GROUPS))),
    )


def plain_grpo(values: dict[str, list[np.ndarray]], objective: Grpo) -> float:
    """The step's loss, one position at a time."""
    total = 0.0
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            lam, old, ref, adv = (
                float(values[k][row][t]) for k in ("logprobs", "old_logprobs", "ref_logprobs", "advantages")
            )
            ratio = math.exp(lam - old)
            clipped = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
            loss = -min(ratio * adv, clipped * adv)
            loss += objective.kl_coef * (math.exp(ref - lam) - (ref - lam) - 1)
            if objective.normalise == "token":
                weight = 1 / sum(LENGTHS)
            elif objective.normalise == "sequence":
                weight = 1 / len(LENGTHS) / length
            else:
                mates = [n for n, g in zip(LENGTHS, GROUPS, strict=True) if g == GROUPS[row]]
                weight = 1 / len(set(GROUPS)) / sum(mates)
            total += weight * loss
    return total


@pytest.mark.parametrize("normalise", ["token", "sequence", "group"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_grpo_equals_the_plain_formula(rng: np.random.Generator, normalise: str, kl_coef: float) -> None:
    objective = Grpo(clip_low=0.2, clip_high=0.28, kl_coef=kl_coef, normalise=normalise)  # type: ignore[arg-type]
    values = step_values(rng)
    expected = plain_grpo(values, objective)
    for split in ([[0, 1, 2, 3, 4]], [[0, 3], [1, 2, 4]], [[4], [2], [0], [1], [3]]):
        loss = sum(objective(batch_of(values, rows)).loss.item() for rows in split)
        assert loss == pytest.approx(expected, rel=1e-12)


def test_grpo_gradients_equal_finite_differences(rng: np.random.Generator) -> None:
    objective = Grpo(kl_coef=0.1, normalise="sequence")
    values = step_values(rng)
    batch = batch_of(values, [0, 1, 2, 3, 4])
    objective(batch).loss.backward()
    gradient = batch.logprobs.grad
    assert gradient is not None
    position = 0
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            ends = []
            for step in (1e-6, -1e-6):
                values["logprobs"][row][t] += step
                ends.append(plain_grpo(values, objective))
                values["logprobs"][row][t] -= step
            assert gradient[position].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-7)
            position += 1


def test_grpo_metrics(rng: np.random.Generator) -> None:
    values = step_values(rng)
    output = Grpo(kl_coef=0.1)(batch_of(values, [0, 1, 2, 3, 4]))
    means = {name: float(m.total) / float(m.count) for name, m in output.metrics.items()}
    lam, old, ref, adv = (np.concatenate(values[k]) for k in values)
    ratio = np.exp(lam - old)
    clipped = np.clip(ratio, 0.8, 1.2)
    assert means["ratio"] == pytest.approx(ratio.mean())
    assert means["clip_fraction"] == pytest.approx(np.mean(ratio * adv > clipped * adv))
    assert means["kl_old"] == pytest.approx(np.mean(np.exp(old - lam) - (old - lam) - 1))
    assert means["kl_ref"] == pytest.approx(np.mean(np.exp(ref - lam) - (ref - lam) - 1))
    assert means["logprob"] == pytest.approx(lam.mean())


def test_weights_of_a_step_sum_to_one(rng: np.random.Generator) -> None:
    batch = batch_of(step_values(rng), [0, 1, 2, 3, 4])
    for normalise in ("token", "sequence", "group"):
        assert batch.weights(normalise).sum().item() == pytest.approx(1)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitate:
    """A user's objective."""

    scale: float = 1.0
    columns = ()

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveOutput:
        return ObjectiveOutput(loss=-self.scale * (batch.weights("token") * batch.logprobs).sum())


def test_objectives_come_from_the_list_or_an_import_path() -> None:
    assert build_objective(ObjectiveSection(options={"kl_coef": 1})) == Grpo(kl_coef=1.0)
    assert Grpo().columns == ("old_logprobs", "advantages")
    assert Grpo(kl_coef=1).columns == ("old_logprobs", "advantages", "ref_logprobs")
    custom = build_objective(ObjectiveSection(name=f"{__name__}:Imitate", options={"scale": 2.0}))
    assert custom == Imitate(scale=2.0)


def test_the_documented_objective_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "training.md"
    code = guide.read_text(encoding="utf-8").split("```python\n# my_objectives.py\n")[1].split("```")[0]
    (tmp_path / "my_objectives.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    objective = build_objective(ObjectiveSection(name="my_objectives:Reinforce", options={"scale": 0.5}))
    assert objective.columns == ("advantages",)
    values = step_values(rng)
    loss = sum(objective(batch_of(values, rows)).loss.item() for rows in ([0, 3], [1, 2, 4]))
    flat = [
        a * λ for r in range(5) for a, λ in zip(values["advantages"][r], values["logprobs"][r], strict=True)
    ]
    assert loss == pytest.approx(-0.5 * sum(flat) / sum(LENGTHS))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grop", {}, "did you mean grpo?"),
        ("grpo", {"clip_hihg": 0.3}, "did you mean clip_high?"),
        ("grpo", {"clip_low": 2.0}, "clip_low must be in"),
        ("grpo", {"normalise": "batch"}, "must be one of token, sequence, group"),
        ("no_such_module:Name", {}, "cannot import no_such_module:Name"),
        ("json:dumps", {}, "json:dumps is not an objective"),
    ],
)
def test_wrong_objectives_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_objective(ObjectiveSection(name=name, options=options))
    assert message in str(caught.value)
