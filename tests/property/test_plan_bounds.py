"""The bounds against brute force over all partitions of few rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.plan.bounds import least_shared_tokens, least_tokens_in_sets, least_tokens_within_capacity
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from tests.support import tree_from_sequences

Rows = list[list[int]]


def cost(rows: Rows) -> int:
    return len({tuple(r[: i + 1]) for r in rows for i in range(len(r))})


def shared_tokens(parts: list[Rows]) -> int:
    """Tokens of the prefix tree that two or more of the sets hold."""
    prefixes = [{tuple(r[: i + 1]) for r in rows for i in range(len(r))} for rows in parts]
    return sum(users > 1 for users in Counter(chain(*prefixes)).values())


def partitions(rows: Rows) -> Iterator[list[Rows]]:
    """All partitions of the rows into non-empty sets."""
    if len(rows) == 1:
        yield [rows]
        return
    for smaller in partitions(rows[1:]):
        yield [[rows[0]], *smaller]
        for i in range(len(smaller)):
            yield [*smaller[:i], [rows[0], *smaller[i]], *smaller[i + 1 :]]


@settings(max_examples=120, deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=6),
    extra=st.integers(0, 8),
    dp=st.integers(1, 3),
)
def test_bounds_hold_and_sets_are_exact(sequences: Rows, extra: int, dp: int) -> None:
    tree = tree_from_sequences(sequences)
    rows = [tree.tokens(i).tolist() for i in range(tree.num_rows)]
    capacity = int(tree.length.max()) + extra
    fewest: dict[int, int] = {}  # any partition into so many sets
    feasible = []  # within the capacity, whole slots
    shared = []  # within the capacity
    for parts in partitions(rows):
        costs = [cost(p) for p in parts]
        fewest[len(parts)] = min(fewest.get(len(parts), sum(costs)), sum(costs))
        if max(costs) <= capacity:
            shared.append(shared_tokens(parts))
        if max(costs) <= capacity and len(parts) % dp == 0:
            feasible.append(sum(costs))
    for count, tokens in fewest.items():
        assert least_tokens_in_sets(tree.length, tree.lcp, count) == tokens
    assert least_shared_tokens(tree.length, tree.lcp, capacity=capacity) <= min(shared)
    if feasible:
        bound = least_tokens_within_capacity(tree.length, tree.lcp, capacity=capacity, dp=dp)
        assert bound <= min(feasible)
        bundle = plan_tree(tree, PlanOptions(dp=dp, capacity=capacity, planner="harts-l1"))
        assert bundle.metrics["complete_tokens"] >= min(feasible)


def test_the_bound_is_met_where_capacity_forces_copies() -> None:
    # Four leaves of 4 tokens under a root of 4: two fit beside it in 12 tokens, so the root is needed twice.
    tree = tree_from_sequences([[9] * 4 + [i] * 4 for i in range(4)])
    assert least_tokens_within_capacity(tree.length, tree.lcp, capacity=12, dp=1) == 24
    assert least_shared_tokens(tree.length, tree.lcp, capacity=12) == 4
    assert least_shared_tokens(tree.length, tree.lcp, capacity=20) == 0  # all fit beside it
    bundle = plan_tree(tree, PlanOptions(dp=1, capacity=12, planner="harts-l1"))
    assert bundle.metrics["complete_tokens"] == 24
    assert np.isclose(bundle.metrics["within_compression"], bundle.metrics["bound_within"])
