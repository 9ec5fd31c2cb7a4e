"""Small plans for the tests of reports and differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from harts_core.plan.build import build_bundle
from harts_core.plan.bundle import (
    CONSUMER,
    NONE,
    PRODUCER,
    AssignmentTable,
    PlanBundle,
    SequenceTable,
    SpanTable,
    UnitTable,
    WindowTable,
)
from harts_core.plan.cost_model import PRESETS
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import random_sequences, tree_from_sequences


def random_plan(seed: int, *, dp: int = 2, slots: int = 3) -> tuple[RolloutTree, PlanBundle]:
    """A random tree dealt out to dp × slots consumers, sharing within each."""
    rng = np.random.default_rng(seed)
    tree = tree_from_sequences(random_sequences(rng, num_rows=dp * slots * 4))
    place = np.arange(tree.num_rows) % (dp * slots)
    rng.shuffle(place)
    parameters = {"dp": dp, "capacity": 500, "pad": 8, "chunk": 4, "seed": seed}
    bundle = build_bundle(
        tree,
        planner="test",
        parameters=parameters,
        cost_model=PRESETS["tokens"],
        replica=place % dp,
        slot=place // dp,
    )
    return tree, bundle


def windowed_plan() -> PlanBundle:
    """One replica, two slots in one window: unit 0 produces tokens [0, 4), units 1 and 2 add one row each.

    Rows: 5 5 5 5 1 and 5 5 5 5 2 2; chunk 4, capacity 8, pad 4.
    """
    metrics = {"original_tokens": 11, "replay_tokens": 0}
    return PlanBundle(
        planner="hand",
        parameters={"dp": 1, "capacity": 8, "pad": 4, "chunk": 4, "seed": 0, "sharing": "tree"},
        cost_model={"name": "tokens"},
        tree_sha256="0" * 64,
        metrics=metrics,
        units=UnitTable(
            replica=[0, 0, 0],
            kind=[PRODUCER, CONSUMER, CONSUMER],
            window=[0, 0, 0],
            slot=[NONE, 0, 1],
            order=[0, 1, 2],
            complete_tokens=[4, 5, 6],
            computed_tokens=[4, 1, 2],
            padded_tokens=[4, 4, 4],
            cost_forward=[4.0, 1.0, 2.0],
            cost_backward=[8.0, 2.0, 4.0],
        ),
        windows=WindowTable(slot_start=[0], slot_stop=[2]),
        spans=SpanTable(
            unit=[0, 1, 1, 2, 2],
            span=[0, 0, 1, 0, 1],
            parent=[NONE, NONE, 0, NONE, 0],
            start=[0, 0, 4, 0, 4],
            stop=[4, 4, 5, 4, 6],
            row=[0, 0, 0, 1, 1],
            owner=[0, 0, 1, 0, 2],
            owner_span=[0, 0, 1, 0, 1],
        ),
        assignments=AssignmentTable(
            row=[0, 1], replica=[0, 0], slot=[0, 1], unit=[1, 2], start=[0, 0], stop=[5, 6], span=[1, 1]
        ),
        sequences=SequenceTable(
            unit=[0, 1, 2],
            round=[0, 0, 0],
            index=[0, 0, 0],
            spans=Ragged.from_rows([[0], [1], [1]], np.int32),
            replay_start=[0, 4, 4],
            state_unit=[NONE, 0, 0],
            state_span=[NONE, 0, 0],
            state_position=[NONE, 4, 4],
        ),
    )


def with_table(bundle: PlanBundle, table: str, **columns: Any) -> PlanBundle:
    """The bundle with some columns of one table replaced."""
    return replace(bundle, **{table: replace(getattr(bundle, table), **columns)})
