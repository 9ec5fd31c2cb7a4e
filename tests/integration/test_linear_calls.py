"""``[runtime] linear_calls`` reaches the step, changes its calls and not its result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harts_core.errors import ExecError
from harts_core.exec import windows
from harts_core.exec.config import LinearCalls, OptimizerSection
from harts_core.exec.layout import UnitLayout, build_unit_layout
from harts_core.exec.model.config import PRESETS
from harts_core.exec.objectives import Grpo
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from harts_core.trees.tree_file import finish_tree
from tests.support_model import lively_model
from tests.support_train import plan_of, random_tree
from tests.support_windows import window_bundle

CONFIG = replace(PRESETS["cpu-moe"], vocab_size=256)


def make_trainer(calls: LinearCalls) -> Trainer:
    model = lively_model(CONFIG, torch.float64)
    return Trainer(model, Grpo(), Optimizer(model.named_parameters(), OptimizerSection()), linear_calls=calls)


def test_the_step_is_the_same_in_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = finish_tree(random_tree(1), "test")
    bundle = plan_of(tree, slots=2)
    rounds: list[int] = []

    def count(*args: object, **kwargs: object) -> UnitLayout:
        layout = build_unit_layout(*args, **kwargs)  # type: ignore[arg-type]
        rounds.append(len(layout.rounds))
        return layout

    monkeypatch.setattr(windows, "build_unit_layout", count)
    found = {}
    for calls in ("rounds", "levels", "nodes"):
        trainer = make_trainer(calls)
        rounds.clear()
        result = trainer.backward(trainer.prepare(bundle, tree))
        found[calls] = (sum(rounds), result.loss, trainer.optimizer.gradients())
    assert found["nodes"][0] == len(bundle.spans.start) > found["levels"][0] >= found["rounds"][0]
    for calls in ("levels", "nodes"):
        assert found[calls][1] == pytest.approx(found["rounds"][1], rel=1e-12)
        for name, want in found["rounds"][2].items():
            torch.testing.assert_close(
                found[calls][2][name], want, rtol=0, atol=1e-10 * want.abs().max().item()
            )


def test_plans_with_windows_are_refused_by_name() -> None:
    tree = finish_tree(random_tree(2), "test")
    bundle = window_bundle(tree, chunk=16, consumers=2, seed=0)
    trainer = make_trainer("nodes")
    with pytest.raises(ExecError, match="only on units without imports"):
        trainer.backward(trainer.prepare(bundle, tree))
