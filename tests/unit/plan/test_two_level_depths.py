"""Depths and water levels of the planner harts, against naive sets and brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from harts_core.plan.planners.two_level.depths import count_tokens, extend_depth, group_items, shared_depth
from harts_core.plan.planners.two_level.nested_bins import BinLevel, anneal_nested
from harts_core.plan.planners.two_level.water_levels import lower_levels, split_producers
from tests.support import random_sequences, tree_from_sequences


def prefixes(row: tuple[int, ...], depth: int) -> set[tuple[int, ...]]:
    return {row[: k + 1] for k in range(depth)}


@pytest.mark.parametrize("seed", range(30))
def test_depths_against_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = tree_from_sequences(random_sequences(rng, num_rows=25, vocab=3, max_extend=12))
    rows = [tuple(tree.tokens(i).tolist()) for i in range(25)]
    group, part = rng.integers(0, 3, 25), rng.integers(0, 4, 25)
    groups = group_items(tree.lcp, group, 3)
    shared = shared_depth(groups, part)
    budget = rng.integers(0, 30, 3)
    grown = extend_depth(groups, shared, tree.length.astype(np.int64), budget)
    for g in range(3):
        mine = np.flatnonzero(group == g)
        users: dict[tuple[int, ...], set[int]] = {}
        for i in mine:
            for p in prefixes(rows[i], len(rows[i])):
                users.setdefault(p, set()).add(int(part[i]))
        common = {p for p, who in users.items() if len(who) > 1}
        assert set().union(*(prefixes(rows[i], shared[i]) for i in mine)) == common
        held = set().union(*(prefixes(rows[i], grown[i]) for i in mine))
        assert len(held) == count_tokens(groups, grown)[g]
        assert len(held) - len(common) == count_tokens(groups, grown, shared)[g]
        assert len(held) == min(len(common) + budget[g], len(users))
        for i in mine:  # closed: every item sees all of the held tokens on its path
            assert sum(p in held for p in prefixes(rows[i], len(rows[i]))) == grown[i]


def paid(residual: np.ndarray, inner: np.ndarray, level: np.ndarray) -> int:
    return int(level.sum() + (inner + np.maximum(0, residual - level).sum(axis=1)).max())


@pytest.mark.parametrize("seed", range(60))
def test_levels_of_one_window_near_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dp, slots, room = int(rng.integers(2, 5)), int(rng.integers(1, 4)), int(rng.integers(0, 12))
    residual = -np.sort(-rng.integers(0, 9, (dp, slots)), axis=1)
    inner = rng.integers(0, room + 1, dp)
    fixed = np.minimum(residual, rng.integers(0, 4, (dp, slots)))
    level = lower_levels(residual[:, None], fixed[:, None], inner[:, None], np.zeros(dp, np.int64), room, 0)[
        0
    ]
    best = None
    for tried in itertools.product(*(range(r + 1) for r in residual.max(axis=0))):
        hoisted = np.maximum(0, residual - np.array(tried))
        if (inner + hoisted.sum(axis=1) <= room).all() and (residual - hoisted >= fixed).all():
            value = paid(residual, inner, np.array(tried))
            best = value if best is None else min(best, value)
    assert best is not None
    hoisted = np.maximum(0, residual - level)
    assert (inner + hoisted.sum(axis=1) <= room).all()
    assert (residual - hoisted >= fixed).all()
    assert best <= paid(residual, inner, level) <= paid(residual, inner, residual.max(axis=0))
    assert paid(residual, inner, level) <= best + 2  # greedy


def test_levels_reach_the_even_step_where_there_is_room() -> None:
    residual = np.array([[[9, 1]], [[5, 5]]])
    zero = np.zeros((2, 1), np.int64)
    level = lower_levels(residual, np.zeros_like(residual), zero, zero[:, 0], 100, 0)
    assert paid(residual[:, 0], zero[:, 0], level[0]) == 10


@pytest.mark.parametrize("seed", range(40))
def test_split_between_inner_and_outer_producers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dp, windows, room = int(rng.integers(1, 4)), int(rng.integers(1, 4)), 20
    held, outer = rng.integers(0, 26, (dp, windows)), rng.integers(0, 3, dp)
    moved = split_producers(held, outer, room, 60)
    assert (moved >= 0).all()
    assert (moved <= held).all()
    assert (held - moved <= room).all()
    total = outer + moved.sum(axis=1)
    assert (total <= 60).all()
    value = (held - moved).max(axis=0).sum() + total.max()
    forced = np.maximum(0, held - room)
    assert value <= (held - forced).max(axis=0).sum() + (outer + forced.sum(axis=1)).max()


def test_annealing_keeps_least_items_and_repeats_itself() -> None:
    rng = np.random.default_rng(0)
    tree = tree_from_sequences(random_sequences(rng, num_rows=30, duplicates=0.0, prefixes=0.0))
    length = tree.length.astype(np.int64)
    finest = np.arange(6)
    tokens = int((length - tree.lcp).sum())
    levels = [
        BinLevel(of_finest=finest // 3, target=np.full(2, tokens // 2), weight=16, stiffness=10),
        BinLevel(of_finest=finest, target=np.full(6, tokens // 6), weight=4, stiffness=3),
    ]
    start = (np.arange(30) // 5).astype(np.int32)

    def search(seed: int) -> np.ndarray:
        return anneal_nested(
            length, tree.lcp, start, levels,
            least_items=np.full(6, 3), hot=50, cold=1, moves=20_000, seed=seed,
        )  # fmt: skip

    def even_cost(of: np.ndarray) -> int:
        loads = [
            len(
                set().union(
                    *(
                        prefixes(tuple(tree.tokens(i).tolist()), length[i])
                        for i in np.flatnonzero(of // 3 == d)
                    )
                )
            )
            for d in range(2)
        ]
        return 2 * max(loads) + sum(loads)

    found = search(1)
    assert np.bincount(found, minlength=6).min() >= 3
    assert even_cost(found) < even_cost(start)
    assert search(1).tolist() == found.tolist()
    assert search(2).tolist() != found.tolist()
