"""harts logprob: forward-only log-probabilities under every kind of sharing, and the file that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

from harts_core.errors import DataError, ExecError, NonFiniteError
from harts_core.exec.logprob import tree_logprobs
from harts_core.exec.model.config import PRESETS, ModelConfig
from harts_core.exec.model.decoder import HybridModel
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.bundle_file import write_bundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import read_tree, tree_to_table, write_tree
from tests.cli.program import Result, run_harts
from tests.support import tree_from_sequences
from tests.support_model import lively_model, model_weights, reference_logprobs
from tests.support_train import plan_of, random_tree, write_config
from tests.support_windows import chain_bundle, nested_bundle

SCHEMA = Path(__file__).parents[2] / "schemas" / "logprob-report.schema.json"
TINY = ModelConfig.from_dict(
    PRESETS["cpu-moe"].to_dict() | {"num_hidden_layers": 2, "layer_group_size": 2, "vocab_size": 256}
)
TREE = random_tree(11, num_rows=12)
PLANS = {
    "expanded": plan_of(TREE, sharing="none", slots=3),
    "one level": plan_of(TREE, dp=2, slots=2),
    "nested": nested_bundle(TREE, dp=2, slots=3, levels=2, chunk=4, seed=1),
    "chain": chain_bundle(TREE, units=5, chunk=4),
    "psrl": plan_tree(
        TREE,
        PlanOptions(dp=2, capacity=int(TREE.length.max()) // 4, planner="psrl", chunk=4, on_too_long="split"),
    ),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
@pytest.mark.parametrize("plan", PLANS)
def test_equals_one_forward_per_trajectory(plan: str, dtype: torch.dtype, tolerance: float) -> None:
    bundle = PLANS[plan]
    model = HybridModel(TINY, dtype=dtype, seed=3)
    expected = reference_logprobs(TINY, model_weights(model), TREE)
    calls: list[tuple[str, int, int | None]] = []
    found = tree_logprobs(model, bundle, TREE, head_block_rows=7, progress=lambda *call: calls.append(call))
    assert found.valid is None
    assert found.values.dtype == np.float32  # which bounds the tolerance in float64
    for row, want in enumerate(expected):
        np.testing.assert_allclose(found[row], want.detach().numpy(), atol=tolerance, rtol=0)
    assert calls[-1] == ("units", bundle.num_units, bundle.num_units)


def test_other_calls_of_linear_attention() -> None:
    """The same values where they can run, which is on units without imports."""
    model = HybridModel(TINY, dtype=torch.float32, seed=3)
    rounds = tree_logprobs(model, PLANS["expanded"], TREE)
    nodes = tree_logprobs(model, PLANS["expanded"], TREE, linear_calls="nodes")
    np.testing.assert_array_equal(rounds.values, nodes.values)
    with pytest.raises(ExecError, match="nodes runs only on units without imports"):
        tree_logprobs(model, PLANS["nested"], TREE, linear_calls="nodes")


def test_a_value_that_is_not_finite_names_its_trajectory() -> None:
    model = lively_model(TINY, torch.float32)
    with torch.no_grad():
        model.model.word_embeddings.weight[TREE.tokens(7)[-2]] = float("nan")
    with pytest.raises(NonFiniteError, match="not finite; nothing was written") as caught:
        tree_logprobs(model, PLANS["one level"], TREE)
    assert "trajectory t000" in str(caught.value)
    nothing = tree_from_sequences([[1], [2]])
    with pytest.raises(DataError, match="no trajectory of the plan has a trained position"):
        tree_logprobs(model, plan_of(nothing), nothing)


def run(folder: Path, plan: PlanBundle, tree: RolloutTree, *arguments: str | Path) -> Result:
    write_tree(folder / "tree.arrow", tree)
    write_bundle(folder / "plan", plan)
    config = write_config(folder)
    threads = torch.get_num_threads()
    try:
        return run_harts(
            *("logprob", folder / "plan", "--tree", folder / "tree.arrow", "--config", config),
            *("-o", folder / "tree2.arrow", *arguments),
        )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("column", ["old", "ref"])
def test_fills_one_column_and_keeps_the_others(tmp_path: Path, column: str) -> None:
    done = run(tmp_path, PLANS["nested"], TREE, "--as", column, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    after = read_tree(tmp_path / "tree2.arrow")
    name = f"{column}_logprobs"
    before_table, after_table = tree_to_table(TREE), tree_to_table(after)
    changed = [n for n in before_table.schema.names if before_table[n] != after_table[n]]
    assert changed == [name]
    assert after.metadata | {"content_sha256": ""} == TREE.metadata | {"content_sha256": ""}
    assert report["content_sha256"] == after.content_sha256 != TREE.content_sha256
    assert report["positions"] == TREE.trained_counts.sum()
    assert report["rows"] == TREE.num_rows
    assert report["rows_not_in_plan"] == 0
    assert report["original_tokens"] == TREE.original_tokens > report["computed_tokens"]
    model = HybridModel(TINY, dtype=torch.float32, seed=0)
    found = getattr(after, name)
    assert report["mean_logprob"] == pytest.approx(found.values.mean(), rel=1e-6)
    for row, want in enumerate(reference_logprobs(TINY, model_weights(model), TREE)):
        np.testing.assert_allclose(found[row], want.detach().numpy(), atol=1e-5, rtol=0)


def test_a_checkpoint_gives_the_weights(tmp_path: Path) -> None:
    """The old log-probs of a run's own checkpoint make its next step's ratio exactly one."""
    tree = random_tree(12, num_rows=10)
    write_tree(tmp_path / "tree.arrow", tree)
    write_bundle(tmp_path / "plan", plan_of(tree, slots=2))
    config = write_config(tmp_path)
    common = ("--tree", tmp_path / "tree.arrow", "--config", config)
    trained = run_harts("train", tmp_path / "plan", *common, "--out", tmp_path / "run")
    assert trained.returncode == 0, trained.stderr
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    for column, source, target in (("old", "tree", "tree2"), ("ref", "tree2", "tree3")):
        step = nested_bundle(
            read_tree(tmp_path / f"{source}.arrow"), dp=1, slots=3, levels=1, chunk=16, seed=4
        )
        write_bundle(tmp_path / f"{column}-plan", step)
        done = run_harts(
            *("logprob", tmp_path / f"{column}-plan", "--tree", tmp_path / f"{source}.arrow"),
            *("--config", config, "-o", tmp_path / f"{target}.arrow", "--as", column),
            *("--checkpoint", checkpoint),
        )
        assert done.returncode == 0, done.stderr
        assert f"{column}_logprobs of {int(tree.trained_counts.sum())} positions" in done.stdout
    filled = read_tree(tmp_path / "tree3.arrow")
    write_bundle(tmp_path / "next", plan_of(filled, slots=3))
    done = run_harts(
        *("train", tmp_path / "next", "--tree", tmp_path / "tree3.arrow", "--config", config),
        *("--out", tmp_path / "run2", "--checkpoint", checkpoint, "--json"),
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)["steps"][0]
    assert metrics["ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["kl_ref"] == pytest.approx(0, abs=1e-9)


def test_rows_that_the_plan_leaves_out_are_null(tmp_path: Path) -> None:
    tree = random_tree(13, num_rows=12)
    longest = int(tree.length.max())
    options = PlanOptions(dp=1, capacity=longest - 1, planner="harts-l1", on_too_long="drop")
    done = run(tmp_path, plan_tree(tree, options), tree, "--as", "old")
    assert done.returncode == 0, done.stderr
    dropped = np.flatnonzero(tree.length == longest)
    assert f"{len(dropped)} rows are not in the plan; their old_logprobs are null" in done.stderr
    after = read_tree(tmp_path / "tree2.arrow")
    assert after.old_logprobs is not None
    assert [after.old_logprobs.is_null(row) for row in range(12)] == (tree.length == longest).tolist()


def test_mistakes_leave_nothing(tmp_path: Path) -> None:
    other = random_tree(14, num_rows=9)
    done = run(tmp_path, PLANS["one level"], other, "--as", "old")
    assert done.returncode == 4
    assert "the plan is for another rollout tree" in done.stderr
    assert str(tmp_path / "plan") in done.stderr
    done = run(tmp_path, PLANS["one level"], TREE, "--as", "new")
    assert done.returncode == 2
    done = run(tmp_path, PLANS["one level"], TREE, "--as", "old", "-o", tmp_path / "tree.arrow")
    assert done.returncode == 2
    assert "the output is the input " in done.stderr
    done = run(tmp_path, PLANS["one level"], TREE, "--as", "old", "-o", tmp_path / "absent" / "tree.arrow")
    assert done.returncode == 3
    assert "the output folder does not exist" in done.stderr
    done = run(tmp_path, PLANS["one level"], TREE, "--as", "old", "--checkpoint", tmp_path)
    assert done.returncode == 3
    config = (tmp_path / "train.toml").read_text()
    (tmp_path / "two.toml").write_text(config + "\n[parallel]\ndp = 2\n")
    done = run(tmp_path, PLANS["one level"], TREE, "--as", "old", "--config", tmp_path / "two.toml")
    assert done.returncode == 2
    assert "[parallel] asks for 2 processes" in done.stderr
    assert not (tmp_path / "tree2.arrow").exists()
    assert read_tree(tmp_path / "tree.arrow").content_sha256 == TREE.content_sha256
