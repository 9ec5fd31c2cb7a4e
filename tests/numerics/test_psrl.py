"""Plans that split trajectories (psRL, ``--on-too-long split``) against training one by one, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cost_model import PRESETS
from harts_core.plan.layout import TOKEN_WISE
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from tests.numerics.test_windows import MODES, check, weighted_tree

CHUNK = 4


def split_plan(
    tree_name: str, *, planner: str = "psrl", parts: int = 4, dp: int = 1, chunk: int = CHUNK
) -> PlanBundle:
    """A plan whose capacity is a fraction of the longest trajectory."""
    tree = weighted_tree(tree_name)
    options = PlanOptions(
        dp=dp,
        capacity=-(-int(tree.length.max()) // parts),
        planner=planner,
        chunk=chunk,
        on_too_long="split",
        cost_model=PRESETS["tokens"],
    )
    return plan_tree(tree, options)


def microbatches_of_rows(bundle: PlanBundle) -> list[int]:
    return np.bincount(bundle.assignments.row).tolist()


def starts_inside_chunks(bundle: PlanBundle) -> bool:
    """Whether some trajectory is cut where no chunk ends."""
    table = bundle.assignments
    return bool((table.start % bundle.chunk != 0).any())


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("config", ["dense", "moe"])
@pytest.mark.parametrize("tree_name", ["inside-chunks", "depth-9", "random-2"])
def test_a_trajectory_over_four_microbatches(tree_name: str, config: str, recompute: str) -> None:
    bundle = split_plan(tree_name)
    assert max(microbatches_of_rows(bundle)) >= 4
    assert weighted_tree(tree_name).length.max() > 3 * bundle.parameters["capacity"]
    assert starts_inside_chunks(bundle)
    check(config, tree_name, bundle, recompute=recompute)


def test_a_single_trajectory_of_many_times_the_capacity() -> None:
    bundle = split_plan("one-row", parts=8)
    assert microbatches_of_rows(bundle) == [8]
    check("moe", "one-row", bundle)


@pytest.mark.parametrize(
    ("tree_name", "dp"), [("duplicates-and-prefixes", 1), ("random-1", 2), ("several-roots", 2)]
)
def test_several_replicas_and_rows_that_end_inside_others(tree_name: str, dp: int) -> None:
    bundle = split_plan(tree_name, dp=dp, parts=3)
    assert bundle.dp == dp
    check("moe", tree_name, bundle)


def test_chunks_of_64() -> None:
    bundle = split_plan("chunk-64", chunk=64, parts=5)
    assert starts_inside_chunks(bundle)
    check("moe", "chunk-64", bundle, recompute="unit")


@pytest.mark.parametrize("tree_name", ["random-0", "random-3"])
def test_long_rows_beside_a_planner_with_producers(tree_name: str) -> None:
    tree = weighted_tree(tree_name)
    lengths = np.sort(tree.length)
    options = PlanOptions(
        dp=1, capacity=int(lengths[-3]), planner="harts", chunk=CHUNK, on_too_long="split"
    )  # two rows at least are too long
    bundle = plan_tree(tree, options)
    assert bundle.parameters[TOKEN_WISE] > 0
    assert max(microbatches_of_rows(bundle)) > 1
    check("moe", tree_name, bundle)
