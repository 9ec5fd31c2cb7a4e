"""Planning rollouts in memory: the same tree and plan as through files."""

from __future__ import annotations

from pathlib import Path

import pytest

from harts_core.errors import DataError, InfeasiblePlanError
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.step import plan_step
from harts_core.trees.build import Trajectory
from harts_core.trees.tree_file import read_tree, write_tree

ROWS = [
    Trajectory(trajectory_id=str(i), group_id="g", tokens=tokens, loss_spans=[(1, len(tokens))])
    for i, tokens in enumerate([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 5, 6], [7, 7]])
]


def test_equals_the_way_over_files_in_any_order(tmp_path: Path) -> None:
    options = PlanOptions(dp=1, capacity=8, planner="harts-l1")
    tree, bundle = plan_step(iter(ROWS), options, metadata={"vocab_size": 16})
    write_tree(tmp_path / "tree.arrow", tree)
    again = read_tree(tmp_path / "tree.arrow")
    assert plan_tree(again, options).tree_sha256 == bundle.tree_sha256 == tree.content_sha256
    other_tree, other = plan_step(reversed(ROWS), options, metadata={"vocab_size": 16})
    assert other_tree.content_sha256 == tree.content_sha256
    assert other.metrics == bundle.metrics
    assert bundle.metrics["original_tokens"] == 14


def test_errors_name_the_trajectory() -> None:
    options = PlanOptions(dp=1, capacity=4, planner="harts-l1")
    with pytest.raises(DataError, match="no trajectories"):
        plan_step([], options)
    with pytest.raises(DataError, match="'0' appears twice"):
        plan_step([ROWS[0], ROWS[0]], options)
    with pytest.raises(InfeasiblePlanError, match="longer than the capacity"):
        plan_step(ROWS, options)
