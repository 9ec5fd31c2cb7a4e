"""Sharing in whole blocks only, against sets of token prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from harts_core.plan.cache_policy.whole_blocks import whole_block_tokens
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import random_sequences, tree_from_sequences
from tests.unit.plan.plans import windowed_plan


def shared_in_blocks(tree: RolloutTree, size: int) -> int:
    """Tokens of all different blocks, each identified by everything up to its end."""
    rows = [tuple(tree.tokens(row).tolist()) for row in range(tree.num_rows)]
    leaves = {r for r in rows if not any(len(o) > len(r) and o[: len(r)] == r for o in rows)}
    blocks = {leaf[: start + size] for leaf in leaves for start in range(0, len(leaf), size)}
    return sum((len(block) - 1) % size + 1 for block in blocks)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [1, 2, 7, 16, 500])
def test_one_microbatch(seed: int, size: int) -> None:
    """With everything in one microbatch, only forks inside it count."""
    tree = tree_from_sequences(random_sequences(np.random.default_rng(seed), num_rows=25))
    plan = plan_tree(tree, PlanOptions(planner="psrl", dp=1, capacity=10_000))
    assert plan.num_units == 1
    assert whole_block_tokens(plan, size) == shared_in_blocks(tree, size)


def test_imports_lose_the_block_that_they_leave() -> None:
    """Two units leave a producer's run after four tokens, each with one path."""
    plan = windowed_plan()
    computed = int(plan.units.computed_tokens.sum())
    assert [whole_block_tokens(plan, size) - computed for size in (1, 2, 3, 4, 5)] == [0, 0, 2, 0, 8]


@pytest.mark.parametrize("planner", ["psrl", "harts"])
def test_blocks_at_least_as_long_as_rows_share_nothing(planner: str) -> None:
    """What is computed is then every path of every unit from its start."""
    tree = tree_from_sequences(random_sequences(np.random.default_rng(1), num_rows=40, prefixes=0))
    plan = plan_tree(tree, PlanOptions(planner=planner, dp=2, capacity=150, chunk=4))
    spans = plan.spans
    imported = spans.owner != spans.unit
    lines = range(len(spans))
    parents = {(int(spans.unit[i]), int(spans.parent[i])) for i in lines}
    leaves = [i for i in lines if (int(spans.unit[i]), i - plan.span_offsets[spans.unit[i]]) not in parents]
    assert imported.any()
    assert whole_block_tokens(plan, 10_000) == sum(int(spans.stop[i]) for i in leaves)
