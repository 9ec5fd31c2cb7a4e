"""The planner harts: edge cases, windows and nested producers, effort and time budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harts_core.errors import InfeasiblePlanError
from harts_core.plan.bundle import CONSUMER, PRODUCER, PlanBundle
from harts_core.plan.bundle_file import bundle_to_tables
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners.harts_l1 import Items, place_leaves
from harts_core.plan.planners.problem import PlanProblem
from harts_core.plan.planners.two_level import planner
from harts_core.plan.planners.two_level.empty_slots import fill_empty_slots
from harts_core.plan.planners.two_level.placement import Placement
from tests.support import random_sequences, tree_from_sequences


def plan(sequences: list[list[int]], **options: Any) -> PlanBundle:
    return plan_tree(tree_from_sequences(sequences, vocab=2000), PlanOptions(planner="harts", **options))


def agents(rng: np.random.Generator, *, tasks: int, rollouts: int, turns: int) -> list[list[int]]:
    """Trajectories that fork off at random turns of their task's earlier ones, under one system prompt."""
    system = rng.integers(0, 1000, 40).tolist()
    rows = []
    for task in range(tasks):
        base = [*system, 1000 + task, *rng.integers(0, 1000, 60).tolist()]
        mine: list[list[int]] = []
        for _ in range(rollouts):
            parent = mine[rng.integers(len(mine))] if mine and rng.random() < 0.7 else base
            keep = int(rng.integers(len(base), len(parent) + 1))
            mine.append(parent[:keep] + rng.integers(0, 1000, int(rng.integers(20, 30 * turns))).tolist())
        rows += mine
    return rows


def test_a_single_row() -> None:
    m = plan([[1, 2, 3]], dp=1, capacity=3).metrics
    assert (m["num_consumers"], m["num_windows"], m["residual_tokens"]) == (1, 0, 3)


def test_identical_rows_fill_every_replica() -> None:
    m = plan([[1, 2, 3, 4]] * 9, dp=4, capacity=4).metrics
    assert (m["num_consumers"], m["complete_tokens"], m["balance"]) == (4, 16, 1.0)


def test_no_sharing_has_no_producers() -> None:
    m = plan([[i] * (i + 1) for i in range(12)], dp=2, capacity=20).metrics
    assert (m["producer_tokens"], m["num_windows"], m["decoder_compression"]) == (0, 0, 1.0)


def test_fewer_rows_than_replicas_are_refused() -> None:
    with pytest.raises(InfeasiblePlanError, match="2 trajectories cannot give each of 3 replicas one"):
        plan([[1], [2]], dp=3, capacity=4)


def test_a_row_longer_than_the_capacity_is_named() -> None:
    with pytest.raises(InfeasiblePlanError, match="longer than the capacity") as error:
        plan([[1], [2, 3, 4], [5]], dp=1, capacity=2)
    assert "rows 1 (3 tokens)" in str(error.value)


def test_one_replica_computes_every_token_once() -> None:
    rng = np.random.default_rng(0)
    m = plan(agents(rng, tasks=4, rollouts=6, turns=4), dp=1, capacity=400).metrics
    assert m["decoder_compression"] == m["bound_decoder"]
    assert m["balance"] == 1.0


def test_capacity_of_the_longest_row() -> None:
    rows = agents(np.random.default_rng(1), tasks=3, rollouts=6, turns=5)
    bundle = plan(rows, dp=2, capacity=max(map(len, rows)))
    assert bundle.units.complete_tokens.max() <= max(map(len, rows))


def test_windows_with_nested_producers_even_the_slots() -> None:
    rows = agents(np.random.default_rng(2), tasks=30, rollouts=6, turns=6)
    bundle = plan(rows, dp=2, capacity=700)
    m, w, u = bundle.metrics, bundle.windows, bundle.units
    spans = list(zip(w.slot_start.tolist(), w.slot_stop.tolist(), strict=True))
    assert (0, m["num_slots"]) in spans  # the outer one, for the whole step
    assert any(a > 0 for a, _ in spans)
    inner = np.flatnonzero((u.kind == PRODUCER) & (u.complete_tokens > u.computed_tokens))
    assert len(inner)  # producers that import from the outer one
    assert m["decoder_compression"] > 1.1 * m["bound_within"]  # no plan without producers reaches that
    assert m["effective_compression"] > 0.93 * m["bound_decoder"]
    assert m["slot_balance_p5"] > 0.9


def steps(rng: np.random.Generator, *, tasks: int, branches: int, turns: int) -> list[list[int]]:
    """Every prefix of branching trajectories that ends with a turn; some leaves fill half a microbatch."""
    rows = []
    for task in range(tasks):
        base = [0, 1, 2, 1000 + task]
        ends: list[list[list[int]]] = []
        for _ in range(branches):
            kept = ends[rng.integers(len(ends))] if ends else []
            mine = kept[: int(rng.integers(0, len(kept) + 1))]
            while len(mine) < turns:
                last = mine[-1] if mine else base
                mine = [*mine, last + rng.integers(0, 1000, int(rng.integers(5, 40))).tolist()]
            ends.append(mine)
            rows += mine
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_long_leaves_and_many_shared_prefixes(seed: int) -> None:
    """One or two leaves to a slot, and shared prefixes that fill the producers of many windows."""
    rows = steps(np.random.default_rng(seed), tasks=12, branches=14, turns=10)
    bundle = plan(rows, dp=4, capacity=round(1.05 * max(map(len, rows))))
    assert bundle.metrics["effective_compression"] > 0.97 * bundle.metrics["bound_decoder"]


def test_rows_for_empty_slots_are_prefixes_of_what_is_near() -> None:
    """Two leaves in three slots: the shortest prefix of one of them stands alone in the third."""
    tree = tree_from_sequences([[1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 6, 6], [7], [7, 8], [7, 8, 9]])
    problem = PlanProblem.of_rows(tree, np.arange(7, dtype=np.int32), dp=1, capacity=9, seed=0)
    items = Items(
        length=np.array([5, 4, 3]), lcp=np.array([0, 2, 0], np.int32), of_row=np.array([0, 0, 0, 1, 2, 2, 2])
    )
    window_of_slot = np.array([0, 0, 0, 1])
    placement = Placement(
        dp=1, replica=np.zeros(3, np.int64), slot=np.array([0, 1, 3]), window_of_slot=window_of_slot
    )
    filled = fill_empty_slots(problem, items, placement)
    assert filled is not None
    more, placed = filled
    assert more.length.tolist() == [2, 5, 4, 3]
    assert more.lcp.tolist() == [0, 2, 2, 0]
    assert more.of_row.tolist() == [0, 1, 1, 2, 3, 3, 3]
    assert placed.slot.tolist() == [2, 0, 1, 3]
    short = Placement(
        dp=1,
        replica=np.zeros(3, np.int64),
        slot=np.array([0, 1, 5]),
        window_of_slot=np.repeat([0, 1], [5, 1]),
    )
    assert fill_empty_slots(problem, items, short) is None  # three to fill, two prefixes in their window


def test_windows_follow_what_producers_have_to_hold() -> None:
    """Half the room in a window's producers, twice the windows."""
    rows = steps(np.random.default_rng(0), tasks=20, branches=14, turns=10)
    tree = tree_from_sequences(rows, vocab=2000)
    capacity = round(1.05 * max(map(len, rows)))

    def count(live: int, producer_capacity: int) -> int:
        problem = PlanProblem.of_rows(
            tree, np.arange(tree.num_rows, dtype=np.int32), dp=2, capacity=capacity, seed=0,
            max_live_producers=live, producer_capacity=producer_capacity,
        )  # fmt: skip
        return planner.window_counts(problem, place_leaves(problem))[0]

    least = count(9, 100 * capacity)  # the slots alone
    usual = count(2, capacity)
    assert usual > least + 1
    assert abs(count(2, capacity // 2) - 2 * usual) <= 1
    assert abs(count(3, capacity // 2) - usual) <= 1


def test_hoisted_tokens_serve_one_consumer() -> None:
    """Producers also hold prefixes that only one consumer uses."""
    bundle = plan(agents(np.random.default_rng(3), tasks=10, rollouts=6, turns=8), dp=2, capacity=800)
    s, u = bundle.spans, bundle.units
    imported = (s.owner != s.unit) & (u.kind[s.unit] == CONSUMER)
    users: dict[tuple[int, int], set[int]] = {}
    for i in np.flatnonzero(imported):
        users.setdefault((int(s.owner[i]), int(s.owner_span[i])), set()).add(int(s.unit[i]))
    assert any(len(units) == 1 for units in users.values())
    assert any(len(units) > 1 for units in users.values())


@pytest.mark.parametrize("live", [1, 2, 3])
@pytest.mark.parametrize("producer_capacity", [50, 300])
def test_producer_limits(live: int, producer_capacity: int) -> None:
    """The validator holds both limits; more room never costs balance."""
    rows = agents(np.random.default_rng(4), tasks=8, rollouts=6, turns=6)
    options = {"dp": 4, "capacity": 700, "pad": 8}
    bundle = plan(rows, max_live_producers=live, producer_capacity=producer_capacity, **options)
    assert bundle.units.computed_tokens[bundle.units.kind == PRODUCER].max() <= producer_capacity


@pytest.mark.parametrize("limit", [2, 3])
def test_windows_have_no_more_slots_than_allowed(limit: int) -> None:
    rows = agents(np.random.default_rng(2), tasks=30, rollouts=6, turns=6)
    free, bundle = plan(rows, dp=2, capacity=700), plan(rows, dp=2, capacity=700, max_window_slots=limit)
    m, w = bundle.metrics, bundle.windows
    slots = w.slot_stop - w.slot_start
    inner = slots < m["num_slots"]  # the outer one is for the whole step
    assert slots[inner].max() <= limit < (free.windows.slot_stop - free.windows.slot_start)[1:].max()
    assert inner.sum() > m["num_slots"] / (limit + 1)
    assert m["decoder_compression"] > 0.97 * free.metrics["decoder_compression"]
    assert bundle.parameters["max_window_slots"] == limit
    assert "max_window_slots" not in free.parameters


def test_short_windows_on_the_slots_of_harts_l1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no placement is found, producers are added to harts-l1's."""
    monkeypatch.setattr(planner, "fill_empty_slots", lambda *_: None)
    rows = agents(np.random.default_rng(8), tasks=10, rollouts=6, turns=6)
    for limit in (2, 4):
        bundle = plan(rows, dp=2, capacity=700, max_window_slots=limit)
        slots = bundle.windows.slot_stop - bundle.windows.slot_start
        inner = slots[slots < bundle.metrics["num_slots"]]
        assert 1 < inner.max() <= limit


def test_more_effort_is_never_worse_and_a_time_budget_is_counted_effort() -> None:
    tree = tree_from_sequences(random_sequences(np.random.default_rng(5), num_rows=30, max_extend=80))
    options: dict[str, Any] = {"dp": 2, "capacity": 400}

    def cost(bundle: PlanBundle) -> float:
        u = bundle.units
        total = 0.0
        for kind, place in ((CONSUMER, u.slot), (PRODUCER, u.window)):
            for p in np.unique(place[u.kind == kind]):
                mine = (u.kind == kind) & (place == p)
                total += u.cost_forward[mine].max() + u.cost_backward[mine].max()
        return total

    costs = [cost(plan_tree(tree, PlanOptions(effort=n, **options))) for n in (1, 2, 4)]
    assert costs == sorted(costs, reverse=True)
    timed = plan_tree(tree, PlanOptions(effort=1, time_budget_s=0.2, **options))
    rounds = timed.parameters["effort"]
    assert rounds > 1
    again = plan_tree(tree, PlanOptions(effort=rounds, **options))
    assert again.parameters == timed.parameters
    tables = bundle_to_tables(timed)
    assert all(tables[name].equals(table) for name, table in bundle_to_tables(again).items())
