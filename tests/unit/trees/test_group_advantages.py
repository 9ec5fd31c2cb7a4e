from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harts_core.errors import DataError
from tests.unit.trees.ingest_helpers import ingest_rows, row

REWARDS = {"a": 4.0, "b": 1.0, "c": 1.0}


def test_every_rollout_counts_once(tmp_path: Path) -> None:
    """Rollout a has three steps, b one: the mean is of two rewards, not of four."""
    records = [row(trajectory_id="a", step=i, tokens=[5, 6, 7, i], reward=1.0) for i in range(3)]
    records += [row(trajectory_id="b", step=0, reward=0.0, tokens=[5, 6, 9, 9])]
    records += [row(trajectory_id="c", group_id="h", reward=3.0, tokens=[1, 1, 1, 1])]
    tree, _ = ingest_rows(tmp_path, records, advantages="grpo")
    assert tree.advantages is not None
    values = dict(zip(tree.trajectory_id, tree.advantages.values.tolist(), strict=True))
    high = np.float32(0.5 / (0.5 + 1e-6))
    assert values == {"a#0": high, "a#1": high, "a#2": high, "b#0": -high, "c": 0.0}
    assert tree.metadata["content_sha256"] == tree.content_sha256


def test_dr_grpo_does_not_divide(tmp_path: Path) -> None:
    records = [
        row(trajectory_id=n, reward=r, tokens=[5, 6, 7, i]) for i, (n, r) in enumerate(REWARDS.items())
    ]
    tree, _ = ingest_rows(tmp_path, records, advantages="dr_grpo")
    assert tree.advantages is not None
    values = dict(zip(tree.trajectory_id, tree.advantages.values.tolist(), strict=True))
    assert values == {"a": 2.0, "b": -1.0, "c": -1.0}


def test_rewards_that_differ_inside_a_rollout(tmp_path: Path) -> None:
    records = [row(trajectory_id="a", step=i, tokens=[5, 6, 7, i], reward=float(i)) for i in range(3)]
    records += [row(trajectory_id="b", step=0, reward=0.0, tokens=[5, 6, 9, 9])]
    tree, report = ingest_rows(tmp_path, records, advantages="grpo")
    assert tree.advantages is not None
    np.testing.assert_allclose(np.abs(tree.advantages.values), 1, atol=1e-5)  # rewards 2 and 0
    (reason,) = report.warnings
    assert reason == "advantages: rows of one rollout have different rewards; the last step's counts"


def test_missing_reward_names_the_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--advantages grpo needs a reward on every row") as error:
        ingest_rows(tmp_path, [row(reward=1.0), row(trajectory_id="b")], advantages="grpo")
    assert error.value.where == "trajectory b"
