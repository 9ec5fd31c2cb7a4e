"""The planner harts on random forests: valid, deterministic, and never worse than harts-l1."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.errors import InfeasiblePlanError
from harts_core.plan.build import unit_table
from harts_core.plan.bundle import CONSUMER, PRODUCER, PlanBundle
from harts_core.plan.bundle_file import bundle_to_tables
from harts_core.plan.cost_model import PRESETS
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners.harts_l1 import place_leaves
from harts_core.plan.planners.problem import PlanProblem
from harts_core.plan.planners.two_level.empty_slots import fill_empty_slots
from harts_core.plan.planners.two_level.placement import Placement, equal_runs, place_items
from harts_core.plan.planners.two_level.score import score_layout
from harts_core.plan.planners.two_level.sharing import ProducerLimits, share_prefixes
from harts_core.plan.windows_layout import ProducerLevel, layout_windows
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import random_sequences, tree_from_sequences

SEEDS = st.integers(0, 2**32 - 1)


def random_options(rng: np.random.Generator, tree: RolloutTree) -> dict[str, Any]:
    return {
        "dp": int(rng.integers(1, 4)),
        "capacity": int(tree.length.max()) + int(rng.integers(0, 60)),
        "pad": int(rng.choice([1, 4])),
        "chunk": int(rng.choice([4, 16])),
        "seed": int(rng.integers(0, 100)),
        "producer_capacity": int(rng.choice([5, 40, 200])),
        "max_live_producers": int(rng.integers(1, 4)),
        "max_window_slots": int(rng.integers(1, 6)) if rng.random() < 0.5 else None,
        "cost_model": PRESETS[str(rng.choice(["tokens", "ling-3.0-tiny"]))],
    }


def cost(bundle: PlanBundle) -> float:
    """Φ, naively: every slot and window waits for its most expensive unit, forward and backward."""
    u = bundle.units
    places: dict[tuple[int, int], list[int]] = {}
    for i in range(bundle.num_units):
        place = int(u.slot[i]) if u.kind[i] == CONSUMER else int(u.window[i])
        places.setdefault((int(u.kind[i]), place), []).append(i)
    return sum(
        max(u.cost_forward[i] for i in units) + max(u.cost_backward[i] for i in units)
        for units in places.values()
    )


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_never_worse_than_l1_and_the_same_for_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = random_sequences(
        rng,
        num_rows=int(rng.integers(3, 30)),
        num_roots=int(rng.integers(1, 4)),
        vocab=int(rng.integers(2, 50)),
    )
    tree = tree_from_sequences(sequences)
    options = random_options(rng, tree)
    try:
        l1 = plan_tree(tree, PlanOptions(planner="harts-l1", **options))
    except InfeasiblePlanError:
        return
    ours = plan_tree(tree, PlanOptions(planner="harts", **options))  # validated
    assert cost(ours) <= cost(l1) * (1 + 1e-12)
    assert ours.units.padded_tokens.sum() <= l1.units.padded_tokens.sum()
    slots = ours.windows.slot_stop - ours.windows.slot_start
    limit = options["max_window_slots"] or ours.metrics["num_slots"]
    assert all(s <= limit or s == ours.metrics["num_slots"] for s in slots.tolist())
    shuffled = tree_from_sequences([sequences[i] for i in rng.permutation(len(sequences))])
    again = plan_tree(shuffled, PlanOptions(planner="harts", **options))
    assert again.metrics == ours.metrics
    tables, others = bundle_to_tables(ours), bundle_to_tables(again)
    for name, table in tables.items():
        assert table.equals(others[name]), name


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_producers_of_any_placement(seed: int) -> None:
    """Sharing and hoisting compute each token at most as often as without, within every limit."""
    rng = np.random.default_rng(seed)
    n, dp, slots = int(rng.integers(6, 40)), int(rng.integers(1, 4)), int(rng.integers(1, 7))
    tree = tree_from_sequences(random_sequences(rng, num_rows=n, vocab=20))
    slots = max(1, min(slots, n // dp))
    place = np.arange(n) % (dp * slots)
    rng.shuffle(place)
    windows = np.minimum(np.arange(slots) * int(rng.integers(1, 4)) // slots, slots - 1)
    placement = Placement(
        dp=dp, replica=place % dp, slot=place // dp, window_of_slot=np.unique(windows, return_inverse=True)[1]
    )
    limits = ProducerLimits(
        capacity=int(rng.choice([3, 30, 300])), live=int(rng.integers(1, 4)), pad=int(rng.choice([1, 4]))
    )
    sharing = share_prefixes(tree.length.astype(np.int64), tree.lcp, placement, limits)

    def padded(levels: list[ProducerLevel], slot: np.ndarray) -> tuple[Any, Any]:
        layout = layout_windows(
            tree, dp=dp, replica=place.astype(np.int32) % dp, slot=slot.astype(np.int32), levels=levels
        )
        return layout, unit_table(layout, limits.pad, PRESETS["tokens"])

    levels = [
        ProducerLevel(window_of_slot=w.astype(np.int32), depth=d.astype(np.int32))
        for w, d in zip(sharing.windows, sharing.depth, strict=True)
    ]
    layout, units = padded(levels, sharing.placement.slot)
    _, before = padded([], placement.slot)
    assert units.padded_tokens.sum() <= before.padded_tokens.sum()
    assert units.computed_tokens[units.kind == PRODUCER].max(initial=0) <= limits.capacity
    live = np.zeros((slots, dp), int)
    for u in np.flatnonzero(units.kind == PRODUCER):
        w = units.window[u]
        live[layout.windows.slot_start[w] : layout.windows.slot_stop[w], units.replica[u]] += 1
    assert live.max() <= limits.live
    slot_tokens = np.zeros((slots, dp), int)
    mine = units.kind == CONSUMER
    slot_tokens[units.slot[mine], units.replica[mine]] = units.complete_tokens[mine]
    others = np.zeros((slots, dp), int)
    others[before.slot, before.replica] = before.complete_tokens
    for d in range(dp):  # slots are only reordered within their window
        for w in np.unique(placement.window_of_slot):
            run = placement.window_of_slot == w
            assert sorted(slot_tokens[run, d]) == sorted(others[run, d])
    model = PRESETS["tokens"]
    with_producers = score_layout(layout, dp=dp, pad=limits.pad, cost_model=model)
    assert with_producers.padded_tokens == units.padded_tokens.sum()


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_placements_are_within_the_capacity_and_leave_no_slot_empty(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, num_rows=int(rng.integers(8, 40)), prefixes=0.4)
    tree = tree_from_sequences(sequences)
    dp, windows = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    capacity = int(tree.length.max()) + int(rng.integers(0, 100))
    problem = PlanProblem.of_rows(
        tree, np.arange(tree.num_rows, dtype=np.int32), dp=dp, capacity=capacity, seed=0
    )
    items = place_leaves(problem)
    if len(items.length) < dp * windows:
        return
    placed = place_items(
        items.length, items.lcp, dp=dp, windows=windows, capacity=capacity, moves=1, seed=seed % 100
    )
    filled = fill_empty_slots(problem, items, placed)
    paths = [tree.tokens(i).tolist() for i in range(tree.num_rows)]

    def tokens(rows: np.ndarray) -> set[tuple[int, ...]]:
        return {tuple(paths[i][: k + 1]) for i in np.flatnonzero(rows) for k in range(len(paths[i]))}

    slot, replica = placed.slot[items.of_row], placed.replica[items.of_row]
    cells = [
        [tokens((replica == d) & (placed.window_of_slot[slot] == w)) for w in range(placed.num_windows)]
        for d in range(dp)
    ]
    for mine in cells:  # the windows of each replica in the order of what no other window uses
        alone = [len(cell - set().union(*(c for c in mine if c is not cell))) for cell in mine]
        assert alone == sorted(alone, reverse=True)
    if filled is None:
        return
    items, placed = filled
    slot, replica = placed.slot[items.of_row], placed.replica[items.of_row]
    for d in range(dp):
        for j in range(len(placed.window_of_slot)):
            assert 0 < len(tokens((replica == d) & (slot == j))) <= capacity
        for w in range(placed.num_windows):  # no row has left its cell
            assert tokens((replica == d) & (placed.window_of_slot[slot] == w)) == cells[d][w]


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_equal_runs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    count = int(rng.integers(1, n + 1))
    length = rng.integers(1, 100, n)
    runs = equal_runs(length, np.minimum(rng.integers(0, 100, n), length - 1), count)
    assert (np.diff(runs) >= 0).all()
    assert sorted(set(runs.tolist())) == list(range(count))
