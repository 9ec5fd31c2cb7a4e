"""Layouts with nested producers, on random forests with random windows and random held prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.plan.build import finish_bundle
from harts_core.plan.bundle import CONSUMER, PRODUCER
from harts_core.plan.cost_model import PRESETS
from harts_core.plan.layout import layout_consumers
from harts_core.plan.validate import validate_plan
from harts_core.plan.windows_layout import ProducerLevel, layout_windows
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import random_sequences, tree_from_sequences
from tests.support_windows import random_depth, random_windows


def random_instance(seed: int) -> tuple[RolloutTree, np.ndarray, np.ndarray, list[ProducerLevel], int]:
    rng = np.random.default_rng(seed)
    dp, slots = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    n = dp * slots + int(rng.integers(0, 15))
    tree = tree_from_sequences(random_sequences(rng, num_rows=n, vocab=int(rng.integers(2, 40))))
    place = np.arange(n) % (dp * slots)
    rng.shuffle(place)
    replica, slot = (place % dp).astype(np.int32), (place // dp).astype(np.int32)
    rows = [tree.tokens(i).tolist() for i in range(n)]
    levels: list[ProducerLevel] = []
    windows, depth = np.zeros(slots, int), np.zeros(n, int)
    for _ in range(int(rng.integers(0, 4))):
        windows = random_windows(rng, windows)
        unit = [(int(windows[slot[i]]), int(replica[i])) for i in range(n)]
        depth = random_depth(rng, rows, unit, depth)
        levels.append(ProducerLevel(window_of_slot=windows, depth=depth))
    return tree, replica, slot, levels, dp


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_layout_is_valid_and_holds_what_the_depths_say(seed: int) -> None:
    tree, replica, slot, levels, dp = random_instance(seed)
    layout = layout_windows(tree, dp=dp, replica=replica, slot=slot, levels=levels)
    parameters = {"dp": dp, "capacity": 2**20, "pad": 4, "chunk": 4, "seed": 0, "max_live_producers": 8}
    bundle = finish_bundle(tree, layout, planner="test", parameters=parameters, cost_model=PRESETS["tokens"])
    validate_plan(bundle, tree)
    held = np.stack([np.zeros(tree.num_rows, int), *(level.depth for level in levels), tree.length])
    rows = [tuple(tree.tokens(i).tolist()) for i in range(tree.num_rows)]
    expected: dict[tuple[int, int, int], set[tuple[int, ...]]] = {}
    for i, row in enumerate(rows):
        for m in range(len(levels) + 1):
            place = int(slot[i]) if m == len(levels) else int(levels[m].window_of_slot[slot[i]])
            tokens = expected.setdefault((m, place, int(replica[i])), set())
            tokens.update(row[: p + 1] for p in range(held[m, i], held[m + 1, i]))
    produced = sorted(len(v) for (m, _, _), v in expected.items() if m < len(levels) and v)
    assert sorted(bundle.units.computed_tokens[bundle.units.kind == PRODUCER].tolist()) == produced
    for u in np.flatnonzero(bundle.units.kind == CONSUMER):
        key = (len(levels), int(bundle.units.slot[u]), int(bundle.units.replica[u]))
        assert bundle.units.computed_tokens[u] == len(expected[key])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_without_levels_it_is_the_layout_of_consumers(seed: int) -> None:
    tree, replica, slot, _, dp = random_instance(seed)
    ours = layout_windows(tree, dp=dp, replica=replica, slot=slot, levels=[])
    theirs = layout_consumers(tree, dp=dp, replica=replica, slot=slot, sharing="tree")
    for name in ("replica", "slot", "order", "window"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    for table in ("spans", "assignments"):
        for name in getattr(ours, table).__slots__:
            a, b = getattr(getattr(ours, table), name), getattr(getattr(theirs, table), name)
            assert a.tolist() == b.tolist()
