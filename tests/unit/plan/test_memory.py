"""Tokens alive per slot and replica, against a hand-made plan and a naive walk."""

from __future__ import annotations

import numpy as np
import pytest

from harts_core.plan.bundle import PRODUCER
from harts_core.plan.memory import activation_tokens
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.units import unit_events, unit_links
from tests.support import random_sequences, tree_from_sequences
from tests.unit.plan.plans import windowed_plan


def test_producer_and_consumer() -> None:
    assert activation_tokens(windowed_plan()).tolist() == [[8], [8]]


@pytest.mark.parametrize("dp", [1, 2])
def test_consumers_that_others_import_from_stay(dp: int) -> None:
    """Against the events of the execution, for plans that cut trajectories."""
    tree = tree_from_sequences(random_sequences(np.random.default_rng(7), num_rows=40))
    options = PlanOptions(dp=dp, capacity=70, planner="psrl", pad=8, on_too_long="split")
    bundle = plan_tree(tree, options)
    u = bundle.units
    found = np.zeros((bundle.metrics["num_slots"], dp), int)
    for d in range(dp):
        alive = 0
        for event in unit_events(unit_links(bundle), bundle.units_of_replica(d).tolist()):
            tokens = int(u.padded_tokens[event.unit])
            alive += tokens * ((event.kind == "forward") - (event.kind == "free"))
            if event.kind == "forward":
                found[u.slot[event.unit], d] = alive
    assert activation_tokens(bundle).tolist() == found.tolist()
    assert found.max() > 2 * u.padded_tokens.max()


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
