"""The worked example: an online loop in memory, whose two modes see the same rollouts."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.source import ROOT


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "online_loop"))
    for name in ("online_loop", "sampler", "environment"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("online_loop")


def test_both_modes_take_the_same_steps_on_different_work(example: ModuleType, tmp_path: Path) -> None:
    options = example.LoopOptions(steps=4, tasks=2)
    histories = {mode: example.run_loop(mode, options) for mode in example.MODES}
    shared, repeated = histories["harts"], histories["expanded"]
    assert [s.reward for s in shared] == [s.reward for s in repeated]
    assert all(s.computed_tokens == s.original_tokens == 2 * 8 * 13 for s in repeated)
    assert all(s.computed_tokens < s.original_tokens for s in shared)
    example.write_curves(tmp_path / "out", histories)
    with (tmp_path / "out" / "rewards.csv").open(encoding="utf-8") as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["step", "harts", "expanded"]
    assert [line[0] for line in lines[1:]] == ["1", "2", "3", "4"]
    plot = example.draw({mode: [s.reward for s in history] for mode, history in histories.items()})
    assert "*" in plot


def test_the_sampler_draws_from_the_model(example: ModuleType) -> None:
    """Its log-probabilities are those of training: the first step's ratio is 1 and nothing is clipped."""
    import torch

    from harts_core.exec.config import OptimizerSection
    from harts_core.exec.objectives import Grpo
    from harts_core.exec.optimizer import Optimizer
    from harts_core.exec.trainer import Trainer
    from harts_core.plan.options import PlanOptions
    from harts_core.plan.step import plan_step

    model = example.HybridModel(example.MODEL, dtype=torch.float32, seed=1)
    rng, generator = example.np.random.default_rng(0), torch.Generator().manual_seed(0)
    options = example.LoopOptions(tasks=2)
    tasks = [example.Task.draw(str(i), options.turns, rng) for i in range(2)]
    rows = []
    for task, rollouts in example.sample_rollouts(model, tasks, options, generator):
        rows += example.to_trajectories(task, rollouts)[0]
    trainer = Trainer(model, Grpo(), Optimizer(model.named_parameters(), OptimizerSection()))
    tree, plan = plan_step(rows, PlanOptions(dp=1, capacity=64, planner="harts", chunk=16))
    metrics = trainer.step(plan, tree)
    assert metrics.objective["ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics.objective["clip_fraction"] == 0
    assert metrics.trained_positions == 2 * 8 * 6
