"""Tokens alive per slot and replica, against a hand-made plan and a naive walk."""

from __future__ import annotations

import numpy as np
import pytest

from harts_core.plan.bundle import PRODUCER
from harts_core.plan.memory import activation_tokens
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from tests.support import random_sequences, tree_from_sequences
from tests.unit.plan.plans import windowed_plan


def test_producer_and_consumer() -> None:
    assert activation_tokens(windowed_plan()).tolist() == [[8], [8]]


@pytest.mark.parametrize("seed", range(5))
def test_against_a_walk_over_slots(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = tree_from_sequences(random_sequences(rng, num_rows=40))
    bundle = plan_tree(tree, PlanOptions(dp=2, capacity=int(tree.length.max()) + 20, pad=8))
    u, w = bundle.units, bundle.windows
    alive = activation_tokens(bundle)
    for j in range(bundle.metrics["num_slots"]):
        for d in range(2):
            tokens = 0
            for i in range(bundle.num_units):
                if u.replica[i] != d:
                    continue
                if u.kind[i] == PRODUCER:
                    covers = w.slot_start[u.window[i]] <= j < w.slot_stop[u.window[i]]
                else:
                    covers = u.slot[i] == j
                tokens += int(u.padded_tokens[i]) if covers else 0
            assert alive[j, d] == tokens
