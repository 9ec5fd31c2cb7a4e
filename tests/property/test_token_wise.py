"""Plans that split trajectories: what their tables say, against naive walks over the tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.errors import InfeasiblePlanError, InvalidPlanError
from harts_core.plan.bundle import CONSUMER, PlanBundle
from harts_core.plan.bundle_file import bundle_to_tables
from harts_core.plan.cost_model import PRESETS, CostModel
from harts_core.plan.layout import TOKEN_WISE
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners.packing import spread_heaviest_first
from harts_core.plan.planners.problem import PlanProblem
from harts_core.plan.planners.psrl import place_groups
from harts_core.plan.planners.split import UNPLACED, split_workers
from harts_core.plan.planners.worker_tokens import WorkerTokens, cut_tokens
from harts_core.plan.validate import validate_plan
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import random_sequences, tree_from_sequences

Rows = list[list[int]]
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)
STEEP = CostModel(name="steep", alpha_forward=1.0, beta_forward=0.5, alpha_backward=2.0, beta_backward=1.0)


def distinct(rows: Rows) -> set[tuple[int, ...]]:
    return {tuple(r[: i + 1]) for r in rows for i in range(len(r))}


def token_rows(tree: RolloutTree) -> Rows:
    return [tree.tokens(i).tolist() for i in range(tree.num_rows)]


def owners(bundle: PlanBundle, tree: RolloutTree) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """(replica, token prefix) → the units that compute its last token."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    s, rows = bundle.spans, token_rows(tree)
    for i in np.flatnonzero(s.owner == s.unit).tolist():
        for t in range(s.start[i], s.stop[i]):
            key = int(bundle.units.replica[s.unit[i]]), tuple(rows[s.row[i]][: t + 1])
            found.setdefault(key, []).append(int(s.unit[i]))
    return found


def check_chains(bundle: PlanBundle, tree: RolloutTree) -> None:
    """psRL's promise: on a replica every prefix is computed once, and every position is evaluated where its
    token is computed."""
    validate_plan(bundle, tree)
    rows, a = token_rows(tree), bundle.assignments
    computed = owners(bundle, tree)
    assert all(len(units) == 1 for units in computed.values())
    replica_of_row = dict(zip(a.row.tolist(), a.replica.tolist(), strict=True))
    for i in range(len(a)):
        row, replica = int(a.row[i]), int(a.replica[i])
        assert replica == replica_of_row[row]  # a trajectory stays on one replica
        for t in range(a.start[i], a.stop[i]):
            assert computed[replica, tuple(rows[row][: t + 1])] == [int(a.unit[i])]
    for d in range(bundle.dp):
        mine = [rows[r] for r in rows_of(bundle, d)]
        assert sum(replica == d for replica, _ in computed) == len(distinct(mine))


def rows_of(bundle: PlanBundle, replica: int) -> list[int]:
    a = bundle.assignments
    return sorted(set(a.row[a.replica == replica].tolist()))


@settings(max_examples=120, deadline=None)
@given(
    sequences=SEQUENCES,
    capacity=st.integers(1, 20),
    dp=st.integers(1, 3),
    chunk=st.integers(1, 5),
    data=st.data(),
)
def test_psrl_computes_every_prefix_once_per_worker(
    sequences: Rows, capacity: int, dp: int, chunk: int, data: st.DataObject
) -> None:
    groups = data.draw(st.lists(st.sampled_from("abc"), min_size=len(sequences), max_size=len(sequences)))
    tree = tree_from_sequences(sequences, groups=groups)
    cost = data.draw(st.sampled_from([PRESETS["tokens"], STEEP]))
    options = PlanOptions(
        dp=dp, capacity=capacity, planner="psrl", chunk=chunk, on_too_long="split", cost_model=cost
    )
    try:
        bundle = plan_tree(tree, options)
    except InfeasiblePlanError:  # a replica would be without a row, or without a token in some slot
        assert len(sequences) < dp or len(distinct(token_rows(tree))) > capacity
        return
    check_chains(bundle, tree)
    assert bundle.units.computed_tokens.max() <= capacity
    most = max(len(distinct([token_rows(tree)[r] for r in rows_of(bundle, d)])) for d in range(dp))
    fewest = -(-most // capacity)
    assert fewest <= bundle.metrics["num_slots"] <= 2 * fewest
    if cost.beta_forward == 0:  # work is tokens: the fewest microbatches are even
        assert bundle.metrics["num_slots"] == fewest
        for d in range(dp):
            tokens = bundle.units.computed_tokens[bundle.units.replica == d]
            assert tokens.max() - tokens.min() <= 1


@settings(max_examples=150, deadline=None)
@given(sequences=SEQUENCES, capacity=st.integers(1, 20), data=st.data())
def test_cuts_have_equal_work_or_end_at_the_capacity(
    sequences: Rows, capacity: int, data: st.DataObject
) -> None:
    tree = tree_from_sequences(sequences)
    problem = PlanProblem.of_rows(
        tree,
        np.arange(tree.num_rows, dtype=np.int32),
        dp=1,
        capacity=capacity,
        seed=0,
        cost_model=STEEP,
    )
    worker = WorkerTokens.of_rows(problem, np.arange(tree.num_rows))
    depths = np.concatenate(
        [np.arange(a, b) for a, b in zip(worker.tree.start, worker.tree.stop, strict=True)]
    )
    work = 3.0 + 1.5 * (depths + 1)  # of every token, in depth-first order
    assert worker.num_tokens == len(depths)
    assert worker.work[-1] == pytest.approx(work.sum())
    count = data.draw(st.integers(-(-len(work) // capacity), len(work)))
    cuts = cut_tokens(worker, count=count, capacity=capacity)
    tokens = np.diff(cuts)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(work), count + 1)
    assert tokens.min() >= 1
    assert tokens.max() <= capacity
    running = np.concatenate([[0], np.cumsum(work)])
    free = (tokens[:-1] > 1) & (tokens[:-1] < capacity)
    free &= cuts[1:-1] > len(work) - (count - np.arange(1, count)) * capacity
    free &= cuts[1:-1] < len(work) - (count - np.arange(1, count))
    share = (running[-1] - running[cuts[:-2]]) / (count - np.arange(count - 1))
    off = np.abs(np.diff(running[cuts])[:-1] - share)
    assert (off[free] <= work.max()).all()  # to a token


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), dp=st.integers(1, 4), capacity=st.integers(8, 60))
def test_split_slots_follow_the_planners_own(seed: int, dp: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, num_rows=14, max_extend=30)
    tree = tree_from_sequences(sequences, groups=[f"g{i % 4}" for i in range(14)])
    options = PlanOptions(dp=dp, capacity=capacity, planner="harts-l1", chunk=4, on_too_long="split")
    try:
        bundle = plan_tree(tree, options)
    except InfeasiblePlanError:
        return
    validate_plan(bundle, tree)
    assert bundle.assignments.row[bundle.assignments.start == 0].tolist() == list(range(14))
    u, a = bundle.units, bundle.assignments
    if tree.length.max() <= capacity:
        assert TOKEN_WISE not in bundle.parameters
        return
    first = bundle.parameters[TOKEN_WISE]
    whole = u.slot < first
    assert (u.complete_tokens[whole] <= capacity).all()
    assert (u.computed_tokens[~whole] <= capacity).all()
    long = np.flatnonzero(tree.length > capacity)
    assert (a.slot[np.isin(a.row, long)] >= first).all()
    assert (a.stop - a.start == tree.length[a.row])[a.slot < first].all()


def test_without_long_rows_split_changes_nothing(rng: np.random.Generator) -> None:
    tree = tree_from_sequences(random_sequences(rng, num_rows=20))
    plans = [
        plan_tree(tree, PlanOptions(dp=2, capacity=300, effort=1, on_too_long=rule))
        for rule in ("error", "split")
    ]
    a, b = (bundle_to_tables(plan) for plan in plans)
    assert all(a[name].equals(b[name]) for name in a)


def test_ordinary_rows_fill_the_slots_of_workers_without_long_ones() -> None:
    sequences = [[9, *range(10, 90)]] + [[g, g, *range(g, g + 18)] for g in range(30)]
    tree = tree_from_sequences(sequences, vocab=100)
    problem = PlanProblem.of_rows(tree, np.arange(31, dtype=np.int32), dp=3, capacity=40, seed=0)
    worker = split_workers(problem)
    tokens = [len(distinct([token_rows(tree)[r] for r in np.flatnonzero(worker == d)])) for d in range(3)]
    assert tokens == [81, 80, 80]
    assert (worker == UNPLACED).sum() == 22
    bundle = plan_tree(tree, PlanOptions(dp=3, capacity=40, effort=1, on_too_long="split"))
    assert bundle.metrics["num_slots"] - bundle.parameters[TOKEN_WISE] == 3
    assert bundle.metrics["balance"] > 0.9


def test_the_rule_of_computed_tokens_holds_only_where_the_plan_says_so(rng: np.random.Generator) -> None:
    tree = tree_from_sequences(random_sequences(rng, num_rows=20))
    bundle = plan_tree(tree, PlanOptions(dp=1, capacity=15, planner="psrl", on_too_long="split"))
    assert (bundle.units.complete_tokens > 15).any()
    for change in ({TOKEN_WISE: None}, {TOKEN_WISE: 10**6}, {"capacity": 5}):
        parameters = {k: v for k, v in (bundle.parameters | change).items() if v is not None}
        with pytest.raises(InvalidPlanError, match="more than the capacity"):
            validate_plan(replace(bundle, parameters=parameters), tree)
    for wrong in (-1, True, "0"):
        with pytest.raises(InvalidPlanError, match="token_wise_from_slot must be a slot"):
            validate_plan(replace(bundle, parameters=bundle.parameters | {TOKEN_WISE: wrong}), tree)
    assert (bundle.units.kind == CONSUMER).all()


def test_only_groups_that_level_the_workers_are_cut() -> None:
    rng = np.random.default_rng(0)
    big = [[1, 2, *rng.integers(20, 50, 20).tolist()] for _ in range(30)]
    small = [[3 + g, 4, *rng.integers(20, 50, 20).tolist()] for g in range(6) for _ in range(2)]
    groups = ["big"] * 30 + [f"s{g}" for g in range(6) for _ in range(2)]
    tree = tree_from_sequences(big + small, groups=groups)
    rows = np.arange(tree.num_rows, dtype=np.int32)
    problem = PlanProblem.of_rows(tree, rows, dp=3, capacity=100, seed=0, cost_model=PRESETS["tokens"])
    worker = place_groups(problem)
    of_group = {
        name: {int(worker[r]) for r in range(tree.num_rows) if tree.group_id[r] == name}
        for name in set(groups)
    }
    assert len(of_group.pop("big")) > 1
    assert all(len(workers) == 1 for workers in of_group.values())
    tokens = [len(distinct([token_rows(tree)[r] for r in np.flatnonzero(worker == d)])) for d in range(3)]
    assert max(tokens) - min(tokens) <= 44  # the lightest group


def test_identical_rows_fill_every_worker() -> None:
    tree = tree_from_sequences([[1, 2, 3]] * 8)
    rows = np.arange(8, dtype=np.int32)
    problem = PlanProblem.of_rows(tree, rows, dp=4, capacity=3, seed=0)
    assert sorted(set(place_groups(problem).tolist())) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(6))
def test_levelling_is_never_worse_than_whole_groups(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, num_rows=40, max_extend=40, num_roots=8)
    tree = tree_from_sequences(sequences, groups=[f"g{int(g)}" for g in rng.integers(0, 6, 40)])
    rows = np.arange(40, dtype=np.int32)
    problem = PlanProblem.of_rows(tree, rows, dp=3, capacity=100, seed=0, cost_model=PRESETS["tokens"])

    def heaviest(worker: np.ndarray) -> int:
        """Tokens, shared within a group only, as the estimate has them (3 a token)."""
        names = np.array(tree.group_id)
        return max(
            sum(
                len(distinct([token_rows(tree)[r] for r in np.flatnonzero((worker == d) & (names == g))]))
                for g in set(names)
            )
            for d in range(3)
        )

    group = np.unique(np.array(tree.group_id), return_inverse=True)[1]
    work = [heaviest(np.where(group == g, 0, -1)) for g in range(group.max() + 1)]
    whole = spread_heaviest_first(np.array(work), 3)[group]
    levelled = heaviest(place_groups(problem))
    assert levelled <= heaviest(whole)
    total = sum(work)
    assert levelled >= total / 3
