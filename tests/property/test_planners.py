"""Every planner on random forests: plans are valid, and a pure function of the tree and the options."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.errors import InfeasiblePlanError
from harts_core.plan.bundle_file import bundle_to_tables, read_bundle, write_bundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners import PLANNERS
from harts_core.plan.planners.bins import bins_of_partition, insert_row, remove_row
from harts_core.plan.planners.contiguous import contiguous_partitions, natural_runs
from harts_core.plan.planners.greedy import BEST_FIT, MAX_SHARED, align_count, pack_greedily
from harts_core.plan.validate import validate_plan
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import naive_lcp, random_sequences, tree_from_sequences

Rows = list[list[int]]
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)


def cost(rows: Rows) -> int:
    """Compact tokens of some rows: the number of their distinct prefixes."""
    return len({tuple(r[: i + 1]) for r in rows for i in range(len(r))})


def tree_arrays(tree: RolloutTree) -> tuple[Rows, np.ndarray, np.ndarray]:
    return [tree.tokens(i).tolist() for i in range(tree.num_rows)], tree.length, tree.lcp


@settings(max_examples=150, deadline=None)
@given(sequences=SEQUENCES, extra=st.integers(0, 8), data=st.data())
def test_contiguous_equals_brute_force(sequences: Rows, extra: int, data: st.DataObject) -> None:
    rows, length, lcp = tree_arrays(tree_from_sequences(sequences[:9]))
    n, capacity = len(rows), int(length.max()) + extra
    solved = contiguous_partitions(length, lcp, capacity=capacity, counts=list(range(1, n + 1)))
    for count in range(1, n + 1):
        best = None
        for cuts in itertools.combinations(range(1, n), count - 1):
            bounds = [0, *cuts, n]
            costs = [cost(rows[a:b]) for a, b in itertools.pairwise(bounds)]
            if max(costs) <= capacity and (best is None or sum(costs) < best):
                best = sum(costs)
        if best is None:
            assert count not in solved
            continue
        tokens, partition = solved[count]
        assert tokens == best
        parts = [[rows[i] for i in np.flatnonzero(partition == b)] for b in range(count)]
        assert sum(map(cost, parts)) == best
        assert max(map(cost, parts)) <= capacity
        assert (np.diff(partition) >= 0).all()
    assert natural_runs(length, lcp, capacity) == min(solved)


@settings(max_examples=100, deadline=None)
@given(sequences=SEQUENCES, extra=st.integers(0, 12), rule=st.sampled_from([BEST_FIT, MAX_SHARED]))
def test_greedy_packs_within_the_capacity_and_aligns_exactly(sequences: Rows, extra: int, rule: int) -> None:
    rows, length, lcp = tree_arrays(tree_from_sequences(sequences))
    capacity = int(length.max()) + extra
    packed = pack_greedily(length, lcp, order=np.argsort(-length), rule=rule, capacity=capacity)
    before = sorted(set(packed.tolist()))
    assert before == list(range(len(before)))
    for b in before:
        assert cost([rows[i] for i in np.flatnonzero(packed == b)]) <= capacity
    for count in range(1, len(rows) + 1):
        aligned = align_count(length, lcp, packed, count)
        assert sorted(set(aligned.tolist())) == list(range(count))
        if count == len(before) + 1:  # one split: the cheapest of all
            total = sum(cost([rows[i] for i in np.flatnonzero(aligned == b)]) for b in range(count))
            base = sum(cost([rows[i] for i in np.flatnonzero(packed == b)]) for b in before)
            pairs = [
                naive_lcp(rows[i], rows[j])
                for b in before
                for i, j in itertools.pairwise(np.flatnonzero(packed == b).tolist())
            ]
            assert total == base + min(pairs)


def test_bins_keep_exact_costs_under_moves(rng: np.random.Generator) -> None:
    rows, length, lcp = tree_arrays(tree_from_sequences(random_sequences(rng, num_rows=25)))
    partition = rng.integers(0, 4, 25).astype(np.int32)
    bins = bins_of_partition(length, lcp, partition, 4)
    for _ in range(300):
        x, b = int(rng.integers(25)), int(rng.integers(4))
        remove_row(bins, x)
        insert_row(bins, x, b)
        partition[x] = b
    for b in range(4):
        assert bins.load[b] == cost([rows[i] for i in np.flatnonzero(partition == b)])
        assert bins.size[b] == (partition == b).sum()


@pytest.mark.parametrize("planner", ["harts-l1", "expanded"])
@settings(max_examples=60, deadline=None)
@given(sequences=SEQUENCES, extra=st.integers(0, 12), dp=st.integers(1, 4), chunk=st.integers(1, 9))
def test_plans_are_valid(planner: str, sequences: Rows, extra: int, dp: int, chunk: int) -> None:
    tree = tree_from_sequences(sequences)
    capacity = int(tree.length.max()) + extra
    options = PlanOptions(dp=dp, capacity=capacity, planner=planner, chunk=chunk, pad=3)
    if tree.num_rows < dp:
        with pytest.raises(InfeasiblePlanError, match="replicas"):
            plan_tree(tree, options)
        return
    try:
        bundle = plan_tree(tree, options)
    except InfeasiblePlanError:  # only where one consumer cannot hold all (else one slot of any split does)
        everything = cost if planner == "harts-l1" else (lambda rows: sum(map(len, rows)))
        assert everything([tree.tokens(i).tolist() for i in range(tree.num_rows)]) > capacity
        return
    validate_plan(bundle, tree)
    rows = [tree.tokens(i).tolist() for i in range(tree.num_rows)]
    unit = bundle.assignments.unit
    for u in range(bundle.num_units):
        mine = [rows[i] for i in np.flatnonzero(unit == u)]
        expected = cost(mine) if planner == "harts-l1" else sum(map(len, mine))
        assert bundle.units.computed_tokens[u] == expected


def test_never_worse_than_the_best_contiguous_partition(rng: np.random.Generator) -> None:
    for _ in range(20):
        tree = tree_from_sequences(random_sequences(rng, num_rows=40))
        capacity = int(tree.length.max()) * 2
        bundle = plan_tree(tree, PlanOptions(dp=2, capacity=capacity, planner="harts-l1"))
        counts = list(range(2, tree.num_rows + 1, 2))
        solved = contiguous_partitions(tree.length, tree.lcp, capacity=capacity, counts=counts)
        assert bundle.metrics["complete_tokens"] <= min(tokens for tokens, _ in solved.values())
        assert bundle.metrics["within_compression"] <= bundle.metrics["bound_within"]
        assert bundle.metrics["decoder_compression"] <= bundle.metrics["bound_decoder"]


@pytest.mark.parametrize("planner", sorted({"harts-l1", "expanded"} & set(PLANNERS)))
def test_same_bytes_for_any_input_order_and_on_repeat(
    planner: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    sequences = random_sequences(rng, num_rows=30, duplicates=0)
    options = PlanOptions(dp=3, capacity=200, planner=planner)
    contents = []
    for i in range(3):
        order = np.arange(30) if i < 2 else rng.permutation(30)
        shuffled = [sequences[j] for j in order]
        tree = tree_from_sequences(shuffled)
        bundle = plan_tree(tree, options)
        if i < 2:
            write_bundle(tmp_path / str(i), bundle)
            files = sorted(p for p in (tmp_path / str(i)).iterdir() if p.name != "runtime.json")
            contents.append([p.read_bytes() for p in files])
            again = read_bundle(tmp_path / str(i))
            validate_plan(again, tree)
        else:  # trajectory ids differ, so the hash does; the tables do not
            first = bundle_to_tables(read_bundle(tmp_path / "0"))
            assert all(first[name].equals(t) for name, t in bundle_to_tables(bundle).items())
    assert contents[0] == contents[1]
