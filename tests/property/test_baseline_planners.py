"""All planners as equals: valid plans or clear refusals on random forests, and what each one promises."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.errors import InfeasiblePlanError, MissingBackendError
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.bundle_file import bundle_to_tables
from harts_core.plan.cost_model import PRESETS
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners import PLANNERS, PlanProblem
from harts_core.plan.planners import ortools_ffd as ortools_module
from harts_core.plan.planners.groups import at_least, row_groups, shared_in_group
from harts_core.plan.planners.length_balanced import karmarkar_karp
from harts_core.plan.planners.packing import first_fit_decreasing, pack_evenly, spread_heaviest_first
from harts_core.plan.planners.psrl import sequence_work
from harts_core.plan.planners.workers import equal_runs
from harts_core.plan.validate import validate_plan
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import naive_lcp, random_sequences, tree_from_sequences

Rows = list[list[int]]
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)

needs_ortools = pytest.mark.skipif(
    importlib.util.find_spec("ortools") is None, reason="OR-Tools is not installed"
)
EVERY_PLANNER = [
    pytest.param(name, marks=[needs_ortools] if name == "ortools-ffd" else []) for name in PLANNERS
]


def prefixes(rows: Rows) -> int:
    """Compact tokens of some rows: the number of their distinct prefixes."""
    return len({tuple(r[: i + 1]) for r in rows for i in range(len(r))})


def common_prefix(rows: Rows) -> int:
    return min((naive_lcp(a, b) for a, b in itertools.combinations(rows, 2)), default=len(rows[0]))


def expected_tokens(sharing: str, rows: Rows, groups: list[str]) -> int:
    """What a consumer of these rows computes, by the definition of each kind of sharing."""
    if sharing == "tree":
        return prefixes(rows)
    if sharing == "none":
        return sum(map(len, rows))
    total = 0
    for name in set(groups):
        mine = [r for r, g in zip(rows, groups, strict=True) if g == name]
        total += sum(map(len, mine)) - (len(mine) - 1) * common_prefix(mine)
    return total


def options(planner: str, *, dp: int, capacity: int, pad: int = 1) -> PlanOptions:
    return PlanOptions(dp=dp, capacity=capacity, planner=planner, chunk=4, pad=pad, search_budget=0.05)


def check_plan(bundle: PlanBundle, tree: RolloutTree) -> None:
    """The plan passes the validator, and its consumers hold what a naive count of their rows says."""
    validate_plan(bundle, tree)
    rows = [tree.tokens(i).tolist() for i in range(tree.num_rows)]
    for unit in np.unique(bundle.assignments.unit):
        here = bundle.assignments.unit == unit
        mine = bundle.assignments.row[here].tolist()
        stop = bundle.assignments.stop[here].tolist()  # the length, but where trajectories are split
        expected = expected_tokens(
            bundle.parameters["sharing"],
            [rows[i][:n] for i, n in zip(mine, stop, strict=True)],
            [tree.group_id[i] for i in mine],
        )
        assert bundle.units.complete_tokens[unit] == expected


@pytest.mark.parametrize("planner", EVERY_PLANNER)
@settings(max_examples=40, deadline=None)
@given(sequences=SEQUENCES, extra=st.integers(0, 12), dp=st.integers(1, 4), data=st.data())
def test_plans_of_random_forests_are_valid(
    planner: str, sequences: Rows, extra: int, dp: int, data: st.DataObject
) -> None:
    n = len(sequences)
    groups = data.draw(st.lists(st.sampled_from("abc"), min_size=n, max_size=n))
    tree = tree_from_sequences(sequences, groups=groups)
    capacity = int(tree.length.max()) + extra
    if n < dp:
        with pytest.raises(InfeasiblePlanError, match="replicas"):
            plan_tree(tree, options(planner, dp=dp, capacity=capacity))
        return
    try:
        bundle = plan_tree(tree, options(planner, dp=dp, capacity=capacity, pad=3))
    except InfeasiblePlanError:  # never where one consumer could hold all: then one slot of any split does
        assert sum(map(len, sequences)) > capacity
        return
    check_plan(bundle, tree)


@pytest.mark.parametrize("planner", EVERY_PLANNER)
def test_edge_cases(planner: str, rng: np.random.Generator) -> None:
    cases: list[tuple[Rows, int, int]] = [
        ([[1, 2, 3]], 1, 3),  # a single row, T its length
        ([[1, 2, 3]] * 8, 4, 3),  # all identical
        ([[1, 2, 3]] * 5, 2, 40),
        ([[i, i + 1] for i in range(12)], 3, 4),  # nothing shared
        ([[7, 7, i] for i in range(12)], 4, 9),  # one root shared by all
        ([[1] * k for k in range(1, 13)], 3, 12),  # every row a prefix of the next, T the longest
    ]
    for sequences, dp, capacity in cases:
        tree = tree_from_sequences(sequences)
        check_plan(plan_tree(tree, options(planner, dp=dp, capacity=capacity)), tree)
    with pytest.raises(InfeasiblePlanError, match="1 trajectories cannot give each of 2"):
        plan_tree(tree_from_sequences([[1, 2]]), options(planner, dp=2, capacity=9))
    with pytest.raises(InfeasiblePlanError, match="longer than the capacity"):
        plan_tree(tree_from_sequences([[1, 2], [1, 2, 3]]), options(planner, dp=1, capacity=2))
    three = tree_from_sequences([[1, 2], [3, 4], [5, 6]])  # of T each, two replicas
    if planner == "psrl":  # splits one of them
        assert plan_tree(three, options(planner, dp=2, capacity=2)).metrics["num_slots"] == 2
        return
    with pytest.raises(InfeasiblePlanError, match="multiple of 2 replicas"):
        plan_tree(three, options(planner, dp=2, capacity=2))


@pytest.mark.parametrize("planner", EVERY_PLANNER)
def test_the_input_order_changes_nothing(planner: str, rng: np.random.Generator) -> None:
    sequences = random_sequences(rng, num_rows=40, duplicates=0)
    groups = [f"g{i % 6}" for i in range(40)]
    tables = []
    for order in (np.arange(40), rng.permutation(40)):
        tree = tree_from_sequences([sequences[i] for i in order], groups=[groups[i] for i in order])
        tables.append(bundle_to_tables(plan_tree(tree, options(planner, dp=3, capacity=300))))
    assert all(tables[0][name].equals(table) for name, table in tables[1].items())


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.integers(1, 30), min_size=1, max_size=20), data=st.data())
def test_karmarkar_karp_merges_by_differences(weights: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(weights)))
    sets = karmarkar_karp(np.array(weights, np.int64), count)
    assert sorted(set(sets.tolist())) == list(range(count))
    sums = np.bincount(sets, weights)
    assert sorted(sums.tolist()) == naive_differencing(weights, count)


def naive_differencing(weights: list[int], count: int) -> list[int]:
    """Sums of the largest differencing method, with plain lists of K sums; ties: the older state first."""
    states = [(i, [0] * (count - 1) + [w]) for i, w in enumerate(weights)]
    for new in range(len(weights), 2 * len(weights) - 1):
        states.sort(key=lambda s: (s[1][0] - s[1][-1], s[0]))
        (_, a), (_, b) = states[:2]
        states = [*states[2:], (new, sorted(x + y for x, y in zip(a, b[::-1], strict=True)))]
    return states[0][1]


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.integers(1, 20), min_size=1, max_size=15), data=st.data())
def test_packing_keeps_to_the_capacity(weights: list[int], data: st.DataObject) -> None:
    weight = np.array(weights, np.int64)
    capacity = int(weight.max()) + data.draw(st.integers(0, 20))
    fitted = first_fit_decreasing(weight, capacity)
    loads: list[int] = []
    for w in sorted(weights, reverse=True):  # the textbook's first fit
        for b in range(len(loads) + 1):
            if b == len(loads):
                loads.append(w)
                break
            if loads[b] + w <= capacity:
                loads[b] += w
                break
    assert np.bincount(fitted, weight).tolist() == loads
    count = data.draw(st.integers(len(loads), len(weights)))
    packed = pack_evenly(weight, fitted, capacity=capacity, count=count)
    assert sorted(set(packed.tolist())) == list(range(count))
    assert np.bincount(packed, weight).max() <= capacity
    spread = np.bincount(spread_heaviest_first(weight, count), weight)
    assert spread.max() - spread.min() <= weight.max()  # greedy's guarantee


@settings(max_examples=80, deadline=None)
@given(sequences=SEQUENCES, extra=st.integers(0, 10), data=st.data())
def test_equal_runs_are_the_best_cuts(sequences: Rows, extra: int, data: st.DataObject) -> None:
    tree = tree_from_sequences(sequences[:9])
    rows = [tree.tokens(i).tolist() for i in range(tree.num_rows)]
    n, capacity = len(rows), int(tree.length.max()) + extra
    work = np.array(data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), np.float64)
    for count in range(1, n + 1):
        heaviest = []
        for cuts in itertools.combinations(range(1, n), count - 1):
            runs = list(itertools.pairwise([0, *cuts, n]))
            if max(prefixes(rows[a:b]) for a, b in runs) <= capacity:
                heaviest.append(max(work[a:b].sum() for a, b in runs))
        if not heaviest:
            continue
        found = equal_runs(tree.length.astype(np.int64), tree.lcp, work, capacity=capacity, count=count)
        assert found.tolist() == sorted(found.tolist())
        assert sorted(set(found.tolist())) == list(range(count))
        assert max(prefixes([rows[i] for i in np.flatnonzero(found == b)]) for b in range(count)) <= capacity
        assert np.bincount(found, work).max() == min(heaviest)


def problem_of(tree: RolloutTree, dp: int, capacity: int) -> PlanProblem:
    rows = np.arange(tree.num_rows, dtype=np.int32)
    return PlanProblem.of_rows(tree, rows, dp=dp, capacity=capacity, seed=0)


def test_groups_and_sequence_work(rng: np.random.Generator) -> None:
    sequences = random_sequences(rng, num_rows=30)
    tree = tree_from_sequences(sequences, groups=[f"g{i % 4}" for i in range(30)])
    problem = problem_of(tree, 2, 500)
    group, seen = row_groups(problem), list[str]()
    shared = shared_in_group(problem, group)
    work = sequence_work(problem.length, shared, PRESETS["ling-3.0-tiny"])
    cost = PRESETS["ling-3.0-tiny"]
    last: dict[str, list[int]] = {}
    for i in range(30):
        name, tokens = tree.group_id[i], tree.tokens(i).tolist()
        if name not in seen:
            seen.append(name)
        assert group[i] == seen.index(name)
        common = naive_lcp(last.get(name, []), tokens)
        last[name] = tokens
        assert shared[i] == common
        suffix = len(tokens) - common
        pairs = (cost.beta_forward + cost.beta_backward) * suffix * len(tokens)
        assert work[i] == pytest.approx(pairs + (cost.alpha_forward + cost.alpha_backward) * suffix)
    for count in (1, 4, 5, 11, 30):
        pieces = at_least(group, count)
        assert int(pieces.max()) + 1 == max(count, 4)
        for piece in range(int(pieces.max()) + 1):
            assert len(set(group[pieces == piece].tolist())) == 1


def test_whole_groups_stay_on_one_worker(rng: np.random.Generator) -> None:
    sequences = [[g, g + 1, *rng.integers(0, 50, 12).tolist()] for g in range(8) for _ in range(6)]
    tree = tree_from_sequences(sequences, groups=[f"g{i // 6}" for i in range(48)])
    for planner in ("prefix-first", "psrl"):
        a = plan_tree(tree, options(planner, dp=4, capacity=60)).assignments
        workers = {tree.group_id[row]: set() for row in range(48)}  # type: ignore[var-annotated]
        for row, replica in zip(a.row.tolist(), a.replica.tolist(), strict=True):
            workers[tree.group_id[row]].add(replica)
        assert all(len(mine) == 1 for mine in workers.values())
    tokens = plan_tree(tree, options("balance-first", dp=4, capacity=60)).assignments
    per_replica = np.bincount(tokens.replica, tree.length[tokens.row])
    assert per_replica.max() - per_replica.min() <= tree.length.max()


@needs_ortools
def test_cp_sat_is_never_worse_than_its_hint_and_finds_the_optimum(rng: np.random.Generator) -> None:
    sequences = random_sequences(rng, num_rows=12, duplicates=0)
    tree = tree_from_sequences(sequences, groups=[f"g{i % 3}" for i in range(12)])
    rows = [tree.tokens(i).tolist() for i in range(12)]
    capacity = prefixes(rows) * 2 // 3
    assert capacity >= tree.length.max()
    best = min(
        prefixes([rows[i] for i in range(12) if mask >> i & 1])
        + prefixes([rows[i] for i in range(12) if not mask >> i & 1])
        for mask in range(1, 2**12 - 1)
        if max(
            prefixes([rows[i] for i in range(12) if mask >> i & 1]),
            prefixes([rows[i] for i in range(12) if not mask >> i & 1]),
        )
        <= capacity
    )
    plan = plan_tree(tree, PlanOptions(dp=1, capacity=capacity, planner="ortools-ffd", search_budget=20.0))
    assert plan.metrics["num_consumers"] == 2
    assert plan.metrics["complete_tokens"] == best
    assert (plan.parameters["shards"], plan.parameters["shards_optimal"]) == (1, 1)
    first = plan_tree(tree, PlanOptions(dp=1, capacity=capacity, planner="ortools-ffd", search_budget=0.0))
    assert best <= first.metrics["complete_tokens"]


def test_without_ortools_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ortools", None)
    with pytest.raises(MissingBackendError, match="OR-Tools") as caught:
        plan_tree(tree_from_sequences([[1, 2]]), options("ortools-ffd", dp=1, capacity=9))
    assert caught.value.hint == "pip install ortools"
    assert ortools_module.plan_ortools_ffd is PLANNERS["ortools-ffd"]
