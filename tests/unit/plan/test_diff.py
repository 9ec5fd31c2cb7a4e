from __future__ import annotations

from dataclasses import replace

from harts_core.plan.build import build_bundle
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cost_model import PRESETS
from harts_core.plan.diff import NUM_MOVED_SHOWN, diff_plans
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import tree_from_sequences
from tests.unit.plan.plans import random_plan, windowed_plan, with_table

TREE = tree_from_sequences([[1, 1, 1], [1, 1, 2], [1, 2], [3, 3, 3, 3]])


def plan(
    slot: list[int], replica: list[int], tree: RolloutTree = TREE, **parameters: int | str
) -> PlanBundle:
    settings = {"dp": 2, "capacity": 100, "pad": 1, "chunk": 4, "seed": 0} | parameters
    return build_bundle(
        tree,
        planner="test",
        parameters=settings,
        cost_model=PRESETS["tokens"],
        replica=replica,  # type: ignore[arg-type]
        slot=slot,  # type: ignore[arg-type]
    )


def test_a_plan_equals_itself_whatever_its_clock_says() -> None:
    _, bundle = random_plan(0)
    result = diff_plans(bundle, replace(bundle, runtime={"planning_s": 9.0}))
    assert result.same
    assert (result.manifest, result.metrics, result.moved, result.num_moved) == ((), (), (), 0)
    assert all(t.same for t in result.tables)
    assert len(result.tables) == 5


def test_moved_trajectories_and_metric_deltas() -> None:
    a, b = plan([0, 0, 0, 0], [0, 0, 0, 1]), plan([0, 0, 0, 0], [0, 0, 1, 1])
    result = diff_plans(a, b)
    assert not result.same
    assert result.num_moved == 1
    (move,) = result.moved
    assert move.row == 2
    assert (move.a[0].replica, move.b[0].replica, move.a[0].slot, move.b[0].stop) == (0, 1, 0, 2)
    changes = {m.name: m for m in result.metrics}
    assert changes["complete_tokens"].delta == 1  # row 2 shared its first token on replica 0
    assert changes["complete_tokens"].b == a.metrics["complete_tokens"] + 1
    assert "original_tokens" not in changes
    assert result.units_changed == 2
    assert (result.units_added, result.units_removed) == ((), ())


def test_units_added_and_removed() -> None:
    a, b = plan([0, 0, 0, 0], [0, 0, 0, 1]), plan([0, 0, 1, 1], [0, 1, 0, 1])
    result = diff_plans(a, b)
    assert [(u.kind, u.replica, u.slot) for u in result.units_added] == [
        ("consumer", 0, 1),
        ("consumer", 1, 1),
    ]
    assert result.units_removed == ()
    back = diff_plans(b, a)
    assert back.units_removed == result.units_added
    assert [m.delta for m in back.metrics] == [-m.delta for m in result.metrics if m.delta is not None]


def test_producers_are_told_apart_by_window() -> None:
    a = windowed_plan()
    b = with_table(a, "units", computed_tokens=[4, 1, 3])
    result = diff_plans(a, b)
    assert result.units_changed == 1
    assert [t.table for t in result.tables if not t.same] == ["units"]


def test_manifest_changes_are_named() -> None:
    a = plan([0, 0, 0, 0], [0, 0, 0, 1], capacity=50)
    b = replace(plan([0, 0, 0, 0], [0, 0, 0, 1], note="new"), planner="other")
    result = diff_plans(a, b)
    assert [(c.name, c.a, c.b) for c in result.manifest if c.name != "tree_sha256"] == [
        ("parameters.capacity", 50, 100),
        ("parameters.note", None, "new"),
        ("planner", "test", "other"),
    ]
    assert not result.same


def test_rows_of_other_trees_are_not_compared() -> None:
    other = tree_from_sequences([[1, 1, 1], [1, 1, 2], [1, 2], [3, 3, 3, 4]])
    result = diff_plans(plan([0] * 4, [0, 0, 0, 1]), plan([0] * 4, [0, 0, 1, 1], other))
    assert not result.same_tree
    assert (result.num_moved, result.moved) == (None, ())
    assert "tree_sha256" in {c.name for c in result.manifest}


def test_only_the_first_moves_are_listed() -> None:
    tree = tree_from_sequences([[i, i] for i in range(1, 31)])
    half = [0] * 15 + [1] * 15
    result = diff_plans(plan([0] * 30, half, tree), plan([0] * 30, half[::-1], tree))
    assert result.num_moved == 30
    assert [m.row for m in result.moved] == list(range(NUM_MOVED_SHOWN))


def test_a_row_that_one_plan_drops_counts_as_moved() -> None:
    a, b = plan([0, 0, 0, 0], [0, 0, 0, 1]), plan([0, 0, -1, 0], [0, 0, -1, 1])
    result = diff_plans(a, b)
    assert [(m.row, len(m.a), len(m.b)) for m in result.moved] == [(2, 1, 0)]
