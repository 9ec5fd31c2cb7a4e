"""Several plans, windows and minibatches: a run that is killed anywhere ends in the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harts_core.exec.config import OptimizerSection
from harts_core.exec.objectives import Grpo
from harts_core.exec.optimizer import Optimizer, learning_rate
from harts_core.exec.step_data import build_minibatches, build_step_data
from harts_core.exec.trainer import Trainer
from harts_core.plan.build import build_bundle
from harts_core.plan.bundle import PRODUCER
from harts_core.plan.bundle_file import write_bundle
from harts_core.trees.tree_file import write_tree
from tests.cli.program import ROOT, run_harts
from tests.integration.test_trainer import TINY, make_trainer
from tests.support_model import lively_model
from tests.support_train import COST, plan_of, random_tree, write_config
from tests.support_windows import nested_bundle

RUN_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "config.json")


def write_run(folder: Path) -> list[str]:
    """Three plans of two trees, windows in two of them, two minibatches each."""
    trees = [random_tree(20, num_rows=12), random_tree(21, num_rows=12)]
    windows = {"outer": [0, 0, 1, 1], "slots": 4, "levels": 2, "chunk": 4}
    plans = {
        "step-1": nested_bundle(trees[0], dp=2, seed=1, **windows),  # type: ignore[arg-type]
        "step-2": plan_of(trees[1], dp=1, slots=4),
        "step-3": nested_bundle(trees[1], dp=1, seed=2, **windows),  # type: ignore[arg-type]
    }
    assert sum(np.sum(b.units.kind == PRODUCER) for b in plans.values()) >= 3
    for i, tree in enumerate(trees):
        write_tree(folder / f"tree-{i}.arrow", tree)
    for name, bundle in plans.items():
        write_bundle(folder / name, bundle)
    (folder / "plans.json").write_text(json.dumps(list(plans)))
    config = write_config(folder, every=1, keep=2)
    config.write_text(config.read_text().replace("[optimizer]\n", "[optimizer]\nnum_minibatches = 2\n"))
    return list(plans)


def test_killed_at_several_points(tmp_path: Path) -> None:
    write_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.kill_points", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["points"] > 150
    last = Path("checkpoints") / "step-000005"
    for run in report["runs"]:
        for name in RUN_FILES:
            expected = (tmp_path / "straight" / last / name).read_bytes()
            assert (tmp_path / run / last / name).read_bytes() == expected, (run, name)
        lines = [json.loads(x) for x in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        straight = [json.loads(x) for x in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
        for ours, theirs in zip(lines, straight, strict=True):
            for key in ("seconds", "tokens_per_s"):
                del ours[key], theirs[key]
            assert ours == theirs
        assert sorted(p.name for p in (tmp_path / run / "checkpoints").iterdir()) == [
            "step-000004",
            "step-000005",
        ]


def test_several_plans_take_their_steps_in_order(tmp_path: Path) -> None:
    plans = write_run(tmp_path)
    threads = torch.get_num_threads()
    done = run_harts(
        *("train", *(tmp_path / name for name in plans)),
        *("--tree", tmp_path / "tree-1.arrow", "--tree", tmp_path / "tree-0.arrow"),
        *("--config", tmp_path / "train.toml", "--out", tmp_path / "run", "--json"),
    )
    torch.set_num_threads(threads)
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]  # two minibatches of each of three plans
    optimizer = OptimizerSection(learning_rate=1e-3, schedule="cosine", warmup_steps=1, decay_steps=10)
    assert [s["lr"] for s in steps] == [learning_rate(optimizer, i) for i in range(6)]
    trees = [random_tree(20, num_rows=12), random_tree(21, num_rows=12), random_tree(21, num_rows=12)]
    for i, tree in enumerate(trees):
        parts = steps[2 * i : 2 * i + 2]
        assert sum(s["original_tokens"] for s in parts) == tree.original_tokens
        assert sum(s["trained_positions"] for s in parts) == tree.trained_counts.sum()
    assert steps[2]["interface_bytes"] == steps[3]["interface_bytes"] == 0  # step-2 shares nothing across
    assert max(s["interface_bytes"] for s in steps) > 0


def test_a_window_is_not_cut(tmp_path: Path) -> None:
    plans = write_run(tmp_path)
    config = tmp_path / "train.toml"
    config.write_text(config.read_text().replace("num_minibatches = 2", "num_minibatches = 4"))
    done = run_harts(
        *("train", tmp_path / plans[0], "--tree", tmp_path / "tree-0.arrow"),
        *("--config", config, "--out", tmp_path / "run"),
    )
    assert done.returncode == 2
    assert "the plan falls into at most 2" in done.stderr
    assert str(tmp_path / plans[0]) in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("normalise", ["token", "sequence", "group"])
def test_a_minibatch_is_a_step_on_its_own_rows(normalise: str) -> None:
    """Loss, metrics and gradients are those of a plan that holds only these rows."""
    tree = random_tree(22, num_rows=14)
    objective = Grpo(kl_coef=0.1, normalise=normalise)  # type: ignore[arg-type]
    whole = plan_of(tree, dp=1, slots=4)
    parts = build_minibatches(whole, tree, objective.columns, vocab_size=200, num_minibatches=2)
    for part in parts:
        mine = whole.assignments.row[np.isin(whole.assignments.unit, part.units)]
        slot = np.where(np.isin(np.arange(tree.num_rows), mine), np.arange(tree.num_rows) % 2, -1)
        others = np.flatnonzero(slot < 0).tolist()
        alone = build_bundle(
            tree,
            planner="harts-l1",
            parameters={"dp": 1, "capacity": 10**6, "pad": 1, "chunk": 16, "seed": 0, "dropped_rows": others},
            cost_model=COST,
            replica=np.where(slot < 0, -1, 0),
            slot=slot,
            sharing="tree",
        )
        results = []
        for data in (part, build_step_data(alone, tree, objective.columns, vocab_size=200)):
            trainer = make_trainer(objective=objective)
            result = trainer.backward(data)
            results.append((result, dict(trainer.optimizer.gradients()), data))
        (ours, found, a), (theirs, expected, b) = results
        assert a.totals == b.totals
        assert a.original_tokens == b.original_tokens
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-11)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-9)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13)


def test_steps_of_minibatches_reach_the_weights_of_separate_plans() -> None:
    tree = random_tree(23, num_rows=10)
    whole = nested_bundle(tree, dp=1, slots=4, levels=1, chunk=4, seed=2, outer=[0, 0, 1, 1])
    weights = []
    for recompute in ("none", "layer"):
        model = lively_model(TINY, torch.float32)
        optimizer = Optimizer(model.named_parameters(), OptimizerSection(learning_rate=1e-3))
        trainer = Trainer(model, Grpo(), optimizer, recompute=recompute)  # type: ignore[arg-type]
        for data in build_minibatches(whole, tree, Grpo().columns, vocab_size=200, num_minibatches=2):
            trainer.step_on(data)
        assert trainer.steps_done == 2
        weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
    assert all(torch.equal(p, weights[1][n]) for n, p in weights[0].items())
