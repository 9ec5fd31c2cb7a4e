"""Objectives: metrics, weights, and how they are chosen; test_objectives_formulas.py has the formulas."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Clashing(Imitate):
    """An option that the table has already."""

    balance_loss_coef: float = 0.0


def test_objectives_come_from_the_list_or_an_import_path() -> None:
    assert build_objective(ObjectiveSection(options={"kl_coef": 1})) == Grpo(kl_coef=1.0)
    assert Grpo().columns == ("old_logprobs", "advantages")
    assert Grpo(kl_coef=1).columns == ("old_logprobs", "advantages", "ref_logprobs")
    custom = build_objective(ObjectiveSection(name=f"{__name__}:Imitate", options={"scale": 2.0}))
    assert custom == Imitate(scale=2.0)


def test_the_documented_objective_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "objectives.md"
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
        (f"{__name__}:Clashing", {}, "an option balance_loss_coef, which is a key of the table itself"),
        ("json:dumps", {}, "json:dumps is not an objective"),
    ],
)
def test_wrong_objectives_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_objective(ObjectiveSection(name=name, options=options))
    assert message in str(caught.value)
