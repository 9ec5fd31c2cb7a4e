from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from harts_core.errors import DataError, InvalidPlanError
from harts_core.exec.layout import build_unit_layout
from harts_core.exec.objectives.protocol import Column
from harts_core.exec.step_data import StepData, build_step_data
from harts_core.plan.bundle import PlanBundle
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import finish_tree
from tests.support import tree_from_sequences
from tests.support_train import plan_of, random_tree

COLUMNS = ("old_logprobs", "ref_logprobs", "advantages")


def prepare(bundle: PlanBundle, tree: RolloutTree, columns: tuple[Column, ...]) -> StepData:
    return build_step_data(bundle, tree, columns, vocab_size=200)


@pytest.mark.parametrize("sharing", ["tree", "none"])
def test_every_trained_position_appears_once_with_its_own_metadata(sharing: str) -> None:
    tree = random_tree(1, num_rows=14)
    data = prepare(plan_of(tree, sharing=sharing, dp=2, slots=3), tree, COLUMNS)
    counts = np.zeros(tree.num_rows, np.int64)
    assert tree.old_logprobs is not None
    assert tree.advantages is not None
    for unit in data.units:
        layout = build_unit_layout(data.bundle, data.tree, unit)
        batch = data.batch(layout, torch.zeros(len(layout.trained_row), dtype=torch.float64))
        row = batch.rows[batch.sequence].numpy()
        assert np.array_equal(row, layout.trained_row)
        np.add.at(counts, row, 1)
        for p, (r, i) in enumerate(zip(row, layout.trained_index, strict=True)):
            assert batch.column("old_logprobs")[p].item() == tree.old_logprobs[r][i]
            assert batch.column("advantages")[p].item() == tree.advantages[r][0]  # one for the trajectory
        for j, r in enumerate(batch.rows.tolist()):
            mates = [k for k in range(tree.num_rows) if tree.group_id[k] == tree.group_id[r]]
            assert batch.sequence_tokens[j] == tree.trained_counts[r]
            assert batch.group_tokens[j] == tree.trained_counts[mates].sum()
            assert batch.group_sequences[j] == np.count_nonzero(tree.trained_counts[mates])
    assert np.array_equal(counts, tree.trained_counts)
    assert data.totals.tokens == counts.sum()
    assert data.totals.sequences == np.count_nonzero(counts)
    assert data.totals.groups == len({tree.group_id[r] for r in np.flatnonzero(counts)})


def test_advantages_per_position_are_kept_apart() -> None:
    tree = tree_from_sequences([[1, 2, 3], [1, 2, 4, 5]], loss_spans=[[(1, 3)], [(2, 4)]])
    tree = finish_tree(
        replace(tree, advantages=Ragged.from_rows([[0.5, -1.0], [2.0, 3.0]], np.float32)), "test"
    )
    data = prepare(plan_of(tree), tree, ("advantages",))
    batch = data.batch(build_unit_layout(data.bundle, tree, 0), torch.zeros(4))
    assert batch.column("advantages").tolist() == [0.5, -1.0, 2.0, 3.0]


def test_units_run_replica_by_replica_and_slot_by_slot() -> None:
    tree = random_tree(2, num_rows=12)
    bundle = plan_of(tree, dp=2, slots=3)
    data = prepare(bundle, tree, ())
    keys = [(int(bundle.units.replica[u]), int(bundle.units.slot[u])) for u in data.units]
    assert keys == [(d, s) for d in range(2) for s in range(3)]


def with_column(tree: RolloutTree, **columns: Ragged | None) -> tuple[RolloutTree, PlanBundle]:
    tree = finish_tree(replace(tree, **columns), "test")  # type: ignore[arg-type]
    return tree, plan_of(tree)


def test_absent_and_null_columns_are_named() -> None:
    plain = tree_from_sequences([[1, 2, 3], [4, 5], [6]])
    tree, bundle = with_column(plain)
    with pytest.raises(DataError, match="needs the column old_logprobs, which the tree lacks"):
        prepare(bundle, tree, ("old_logprobs",))
    tree, bundle = with_column(plain, old_logprobs=Ragged.from_rows([[-1, -1], None, []], np.float32))
    with pytest.raises(DataError, match="null in 1 trained trajectories") as caught:
        prepare(bundle, tree, ("old_logprobs",))
    assert "t00001" in str(caught.value)
    tree, bundle = with_column(plain, old_logprobs=Ragged.from_rows([[-1, -1], [-2], None], np.float32))
    assert prepare(bundle, tree, ("old_logprobs",)).totals.tokens == 3  # [6] trains nothing


def test_plans_that_cannot_run_are_refused() -> None:
    tree, other = random_tree(3), random_tree(4)
    bundle = plan_of(tree)
    with pytest.raises(InvalidPlanError, match="for another rollout tree"):
        prepare(bundle, other, ())
    units = replace(bundle.units, cost_forward=bundle.units.cost_forward + 1)
    with pytest.raises(InvalidPlanError):
        prepare(replace(bundle, units=units), tree, ())
    nothing = tree_from_sequences([[1], [2]])
    with pytest.raises(DataError, match="no trajectory of the step has a trained position"):
        prepare(plan_of(nothing), nothing, ())


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    tree = random_tree(7, vocab=1000)
    with pytest.raises(DataError, match="the model's vocabulary ends at 199"):
        prepare(plan_of(tree), tree, ())
