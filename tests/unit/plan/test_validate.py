"""The validator accepts good plans and rejects each of many single corruptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harts_core.errors import InvalidPlanError
from harts_core.plan.build import build_bundle, finish_bundle
from harts_core.plan.bundle import NONE, PlanBundle, SpanTable, WindowTable
from harts_core.plan.cost_model import PRESETS
from harts_core.plan.layout import Layout
from harts_core.plan.validate import validate_plan
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import tree_from_sequences
from tests.unit.plan.plans import random_plan, windowed_plan, with_table

# Three units: 0 forks at 9 into two children that fork no more, 1 and 2 are simple paths; 3 too.
SEQUENCES = [
    [1] * 9 + [2] * 5,
    [1] * 9 + [3] * 2,
    [1] * 9 + [4] * 3,
    [5] * 6,
    [5] * 6 + [6] * 4,
    [7] * 5,
    [8] * 3,
]


def plain() -> tuple[RolloutTree, PlanBundle]:
    tree = tree_from_sequences(SEQUENCES, groups=["a", "a", "a", "b", "b", "c", "c"])
    replica, slot = np.array([0, 0, 0, 1, 1, 0, 1]), np.array([0, 0, 0, 0, 0, 1, 1])
    bundle = build_bundle(
        tree,
        planner="test",
        parameters={"dp": 2, "capacity": 20, "pad": 4, "chunk": 4, "seed": 0, "dropped_rows": []},
        cost_model=PRESETS["ling-3.0-tiny"],
        replica=replica,
        slot=slot,
    )
    return tree, bundle


def windowed(*, max_live: int = 1) -> tuple[RolloutTree, PlanBundle]:
    """windowed_plan's tables as a complete bundle of their tree."""
    tree = tree_from_sequences([[5, 5, 5, 5, 1], [5, 5, 5, 5, 2, 2]])
    b = windowed_plan()
    u = b.units
    layout = Layout(
        replica=u.replica,
        kind=u.kind,
        window=u.window,
        slot=u.slot,
        order=u.order,
        windows=b.windows,
        spans=b.spans,
        assignments=b.assignments,
        sharing="tree",
    )
    parameters = {**b.parameters, "max_live_producers": max_live, "producer_capacity": 8}
    return tree, finish_bundle(
        tree, layout, planner="hand", parameters=parameters, cost_model=PRESETS["tokens"]
    )


TREE, PLAIN = plain()
WINDOW_TREE, WINDOWED = windowed()


def changed(bundle: PlanBundle, table: str, column: str, line: int, value: Any) -> PlanBundle:
    values = np.array(getattr(getattr(bundle, table), column))
    values[line] = value
    return with_table(bundle, table, **{column: values})


def dropped_line(bundle: PlanBundle, table: str, line: int) -> PlanBundle:
    old = getattr(bundle, table)
    keep = np.delete(np.arange(len(old)), line)
    columns = {name: getattr(old, name) for name in old.__dataclass_fields__}
    return with_table(
        bundle,
        table,
        **{n: c.take(keep) if isinstance(c, Ragged) else c[keep] for n, c in columns.items()},
    )


def parameters(bundle: PlanBundle, **values: Any) -> PlanBundle:
    return replace(bundle, parameters={**bundle.parameters, **values})


def metric(bundle: PlanBundle, **values: Any) -> PlanBundle:
    return replace(bundle, metrics={**bundle.metrics, **values})


def sequences(bundle: PlanBundle, rows: list[list[int]]) -> PlanBundle:
    return with_table(bundle, "sequences", spans=Ragged.from_rows(rows, np.int32))


def test_accepts_good_plans() -> None:
    validate_plan(PLAIN, TREE)
    validate_plan(WINDOWED, WINDOW_TREE)
    for seed in range(20):
        tree, bundle = random_plan(seed)
        validate_plan(bundle, tree)


def test_shape_of_the_plain_plan() -> None:
    """The corruptions below rely on it."""
    s, q = PLAIN.spans, PLAIN.sequences
    assert s.unit.tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert s.start.tolist() == [0, 9, 9, 9, 0, 0, 0]
    assert [q.spans[i].tolist() for i in range(len(q))] == [[0, 1], [2], [3], [0], [0], [0]]
    assert q.state_position.tolist() == [NONE, 8, 8, NONE, NONE, NONE]


Case = tuple[str, Callable[[], PlanBundle], str]
PLAIN_CASES: list[Case] = [
    ("other tree", lambda: replace(PLAIN, tree_sha256="0" * 64), "another rollout tree"),
    ("bad dp", lambda: parameters(PLAIN, dp=0), "dp must be a positive integer"),
    ("bad sharing", lambda: parameters(PLAIN, sharing="all"), "sharing must be"),
    ("bad dropped rows", lambda: parameters(PLAIN, dropped_rows=[99]), "dropped_rows"),
    ("bad cost", lambda: replace(PLAIN, cost_model={"name": "x"}), "alpha_forward"),
    ("replica", lambda: changed(PLAIN, "units", "replica", 0, 2), "replica is not in"),
    ("kind", lambda: changed(PLAIN, "units", "kind", 0, 5), "kind is unknown"),
    ("consumer without slot", lambda: changed(PLAIN, "units", "slot", 0, NONE), "consumers have a slot"),
    ("unknown window", lambda: changed(PLAIN, "units", "window", 0, 0), "no such window"),
    ("slot twice", lambda: changed(PLAIN, "units", "slot", 2, 0), "not exactly one consumer"),
    ("slots not dense", lambda: changed(PLAIN, "units", "slot", 2, 7), "not dense"),
    ("K no multiple of D", lambda: parameters(PLAIN, dp=3), "not a positive multiple"),
    ("orders", lambda: changed(PLAIN, "units", "order", 0, 1), "orders are not"),
    (
        "orders against slots",
        lambda: with_table(PLAIN, "units", order=[1, 1, 0, 0]),
        "order of their slots",
    ),
    ("span numbering", lambda: changed(PLAIN, "spans", "span", 1, 3), "not numbered"),
    ("span unit", lambda: changed(PLAIN, "spans", "unit", 0, 3), "not sorted by unit"),
    ("empty span", lambda: changed(PLAIN, "spans", "stop", 1, 9), "empty"),
    ("span row", lambda: changed(PLAIN, "spans", "row", 1, 70), "row is not in the tree"),
    ("span past its row", lambda: changed(PLAIN, "spans", "stop", 1, 15), "past the end of its row"),
    ("later parent", lambda: changed(PLAIN, "spans", "parent", 1, 2), "not an earlier span"),
    ("root in the middle", lambda: changed(PLAIN, "spans", "parent", 1, NONE), "root must start"),
    ("gap to the parent", lambda: changed(PLAIN, "spans", "start", 1, 10), "not the parent's stop"),
    ("row off the parent", lambda: changed(PLAIN, "spans", "row", 0, 4), "does not pass through the parent"),
    ("prefix twice", lambda: changed(PLAIN, "spans", "row", 2, 2), "same token prefix"),
    ("owned elsewhere", lambda: changed(PLAIN, "spans", "owner_span", 1, 0), "name itself"),
    ("unknown owner", lambda: changed(PLAIN, "spans", "owner", 1, 9), "no such owner"),
    ("import across replicas", lambda: changed(PLAIN, "spans", "owner", 5, 1), "another replica"),
    ("import from later", lambda: with_table(PLAIN, "spans", owner=[2, 0, 0, 0, 1, 2, 3]), "runs later"),
    ("missing row", lambda: dropped_line(PLAIN, "assignments", 2), "not evaluated in any consumer"),
    ("dropped yet there", lambda: parameters(PLAIN, dropped_rows=[1]), "dropped row is evaluated"),
    ("row twice", lambda: changed(PLAIN, "assignments", "row", 1, 0), "not evaluated"),
    ("rows unsorted", lambda: with_table(PLAIN, "assignments", row=[1, 0, 2, 3, 4, 5, 6]), "not sorted"),
    ("first position", lambda: changed(PLAIN, "assignments", "start", 0, 1), "exactly once"),
    ("last position", lambda: changed(PLAIN, "assignments", "stop", 0, 10), "last positions"),
    ("unknown unit", lambda: changed(PLAIN, "assignments", "unit", 0, 4), "no such unit"),
    ("assignment replica", lambda: changed(PLAIN, "assignments", "replica", 0, 1), "replica is not"),
    ("assignment slot", lambda: changed(PLAIN, "assignments", "slot", 0, 1), "slot is not"),
    ("assignment span", lambda: changed(PLAIN, "assignments", "span", 0, 4), "no such span"),
    ("span too short", lambda: changed(PLAIN, "assignments", "span", 0, 0), "does not hold the last"),
    ("row on another path", lambda: changed(PLAIN, "assignments", "span", 1, 1), "does not lie on"),
    ("complete tokens", lambda: changed(PLAIN, "units", "complete_tokens", 1, 9), "complete_tokens"),
    ("computed tokens", lambda: changed(PLAIN, "units", "computed_tokens", 1, 9), "computed_tokens"),
    ("padded tokens", lambda: changed(PLAIN, "units", "padded_tokens", 1, 10), "padded_tokens"),
    ("capacity", lambda: parameters(PLAIN, capacity=18), "more than the capacity of 18"),
    ("forward cost", lambda: changed(PLAIN, "units", "cost_forward", 0, 1.0), "cost_forward"),
    ("backward cost", lambda: changed(PLAIN, "units", "cost_backward", 0, 1.0), "cost_backward"),
    ("round gap", lambda: changed(PLAIN, "sequences", "round", 2, 2), "do not count"),
    ("index", lambda: changed(PLAIN, "sequences", "index", 1, 1), "do not count"),
    ("no spans", lambda: sequences(PLAIN, [[0, 1], [], [3], [0], [0], [0]]), "has no spans"),
    ("unknown span", lambda: sequences(PLAIN, [[0, 1], [4], [3], [0], [0], [0]]), "no such span"),
    ("not a path", lambda: sequences(PLAIN, [[0], [1, 2], [3], [0], [0], [0]]), "not a child"),
    ("span twice", lambda: sequences(PLAIN, [[0, 1], [1], [3], [0], [0], [0]]), "exactly one sequence"),
    ("span left out", lambda: sequences(PLAIN, [[0], [2], [3], [0], [0], [0]]), "exactly one sequence"),
    ("replay start", lambda: changed(PLAIN, "sequences", "replay_start", 1, 4), "chunk boundary"),
    ("state position", lambda: changed(PLAIN, "sequences", "state_position", 1, 4), "state_position"),
    ("state span", lambda: changed(PLAIN, "sequences", "state_span", 1, 1), "owned span which holds"),
    ("state unit", lambda: changed(PLAIN, "sequences", "state_unit", 1, 2), "owned span which holds"),
    ("state of a zero start", lambda: changed(PLAIN, "sequences", "state_unit", 0, 0), "names a state"),
    (
        "state of the same round",
        lambda: with_table(PLAIN, "sequences", round=[0, 0, 1, 0, 0, 0], index=[0, 1, 0, 0, 0, 0]),
        "not made by an earlier round",
    ),
    ("a metric is missing", lambda: replace(PLAIN, metrics={}), "missing or unknown"),
    ("an unknown metric", lambda: metric(PLAIN, speed=3.0), "missing or unknown"),
    ("sharing none", lambda: parameters(PLAIN, sharing="none"), "has a parent"),
]
PLAIN_CASES += [
    (f"metric {name}", lambda name=name: metric(PLAIN, **{name: PLAIN.metrics[name] + 1}), name)
    for name in PLAIN.metrics
]
WINDOW_CASES: list[Case] = [
    ("producer capacity", lambda: parameters(WINDOWED, producer_capacity=3), "producer capacity of 3"),
    ("window out of slots", lambda: with_table(WINDOWED, "windows", slot_stop=[3]), "not a run of the slots"),
    ("slot outside its window", lambda: with_table(WINDOWED, "windows", slot_stop=[1]), "innermost"),
    ("window not named", lambda: changed(WINDOWED, "units", "window", 1, NONE), "innermost"),
    ("producer with a slot", lambda: changed(WINDOWED, "units", "slot", 0, 0), "producers have none"),
    ("producer in no window", lambda: changed(WINDOWED, "units", "window", 0, NONE), "no window"),
    ("owner does not contain", lambda: changed(WINDOWED, "spans", "stop", 0, 3), "does not contain"),
    (
        "owner imports it itself",
        lambda: with_table(WINDOWED, "spans", owner=[0, 0, 1, 1, 2], owner_span=[0, 0, 1, 0, 1]),
        "itself imports",
    ),
    ("imported yet computed", lambda: sequences(WINDOWED, [[0], [0], [1]]), "imported, not computed"),
    ("evaluated in a producer", lambda: changed(WINDOWED, "assignments", "unit", 0, 0), "in a producer"),
    (
        "too many alive",
        lambda: parameters(
            replace(
                with_table(
                    WINDOWED,
                    "units",
                    kind=[0, 0, 1, 1],
                    window=[0, 1, 1, 0],
                    slot=[NONE, NONE, 0, 1],
                    replica=[0] * 4,
                    order=[0, 1, 2, 3],
                    complete_tokens=[0] * 4,
                    computed_tokens=[0] * 4,
                    padded_tokens=[0] * 4,
                    cost_forward=[0.0] * 4,
                    cost_backward=[0.0] * 4,
                ),
                windows=WindowTable(slot_start=[0, 0], slot_stop=[2, 1]),
            ),
            max_live_producers=1,
        ),
        "alive, the limit is 1",
    ),
]


@pytest.mark.parametrize(
    ("tree", "corrupt", "message"),
    [pytest.param(TREE, c, m, id=name) for name, c, m in PLAIN_CASES]
    + [pytest.param(WINDOW_TREE, c, m, id=name) for name, c, m in WINDOW_CASES],
)
def test_rejects(tree: RolloutTree, corrupt: Callable[[], PlanBundle], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message) as caught:
        validate_plan(corrupt(), tree)
    assert caught.value.where


def test_consumer_needs_every_span() -> None:
    """A row moved away leaves tokens that nobody needs."""
    layout_rows = dropped_line(PLAIN, "assignments", 2)
    with pytest.raises(InvalidPlanError, match="no trajectory of the consumer needs"):
        validate_plan(parameters(layout_rows, dropped_rows=[2]), TREE)


def test_imported_spans_hang_under_imported_ones() -> None:
    tree = tree_from_sequences([[5, 5, 5, 5, 1], [5, 5, 5, 5, 1, 2]])
    spans = SpanTable(  # the producer holds [0, 4) and [4, 5), unit 2 computes [0, 4) itself
        unit=[0, 0, 1, 1, 2, 2, 2],
        span=[0, 1, 0, 1, 0, 1, 2],
        parent=[NONE, 0, NONE, 0, NONE, 0, 1],
        start=[0, 4, 0, 4, 0, 4, 5],
        stop=[4, 5, 4, 5, 4, 5, 6],
        row=[0, 0, 0, 0, 1, 1, 1],
        owner=[0, 0, 0, 0, 2, 0, 2],
        owner_span=[0, 1, 0, 1, 0, 1, 2],
    )
    bundle = replace(WINDOWED, spans=spans, tree_sha256=tree.content_sha256)
    with pytest.raises(InvalidPlanError, match="hangs under an owned one"):
        validate_plan(bundle, tree)


def test_group_sharing_has_one_root_per_group_and_one_level() -> None:
    tree, bundle = random_plan(0)
    with pytest.raises(InvalidPlanError, match=r"two levels deep|second root"):
        validate_plan(parameters(bundle, sharing="group"), tree)


def group_plan(*rows: list[int]) -> tuple[RolloutTree, PlanBundle]:
    """One consumer of one group's rows, sharing by group."""
    tree = tree_from_sequences(list(rows))
    bundle = build_bundle(
        tree,
        planner="test",
        parameters={"dp": 1, "capacity": 99, "pad": 1, "chunk": 4, "seed": 0},
        cost_model=PRESETS["tokens"],
        replica=np.zeros(len(rows), int),
        slot=np.zeros(len(rows), int),
        sharing="group",
    )
    return tree, bundle


def test_a_group_has_several_roots_only_without_a_common_prefix() -> None:
    tree, bundle = group_plan([1, 2], [1, 3], [2])
    assert bundle.spans.parent.tolist() == [NONE] * 3
    validate_plan(bundle, tree)
    tree, _ = group_plan([1, 2], [1, 3])
    roots = SpanTable(
        unit=[0, 0],
        span=[0, 1],
        parent=[NONE, NONE],
        start=[0, 0],
        stop=[2, 2],
        row=[0, 1],
        owner=[0, 0],
        owner_span=[0, 1],
    )
    with pytest.raises(InvalidPlanError, match="second root of one group"):
        validate_plan(replace(bundle, spans=roots, tree_sha256=tree.content_sha256), tree)
    tree, bundle = group_plan([1, 2], [1, 3])
    other = tree_from_sequences([[1, 2], [1, 3], [2]])
    below = SpanTable(
        unit=[0] * 4,
        span=[0, 1, 2, 3],
        parent=[NONE, 0, 0, NONE],
        start=[0, 1, 1, 0],
        stop=[1, 2, 2, 1],
        row=[0, 0, 1, 2],
        owner=[0] * 4,
        owner_span=[0, 1, 2, 3],
    )
    with pytest.raises(InvalidPlanError, match="below one of several roots"):
        validate_plan(replace(bundle, spans=below, tree_sha256=other.content_sha256), other)


def test_windows_may_nest_but_not_cross() -> None:
    rows = [[5, 5, 5, 5, 1], [5, 5, 5, 5, 2, 2], [6], [7]]
    tree = tree_from_sequences(rows)
    bundle = build_bundle(
        tree,
        planner="test",
        parameters={"dp": 1, "capacity": 9, "pad": 1, "chunk": 4, "seed": 0},
        cost_model=PRESETS["tokens"],
        replica=np.zeros(4, int),
        slot=np.arange(4),
    )
    nested = replace(bundle, windows=WindowTable(slot_start=[0, 1], slot_stop=[4, 3]))
    nested = with_table(nested, "units", window=[0, 1, 1, 0])
    with pytest.raises(InvalidPlanError, match="num_windows"):  # nothing else is wrong
        validate_plan(nested, tree)
    crossing = replace(bundle, windows=WindowTable(slot_start=[0, 1], slot_stop=[2, 3]))
    with pytest.raises(InvalidPlanError, match="neither nest nor keep apart"):
        validate_plan(crossing, tree)
