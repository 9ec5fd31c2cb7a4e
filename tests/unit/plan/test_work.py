"""Estimated work: balance, spread, the step's cost and what is alive."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from harts_core.plan.bundle import CONSUMER, PRODUCER
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.second_forwards import with_second_forwards
from harts_core.plan.schedule.units import unit_events, unit_links
from harts_core.plan.work import relative_range, work_report
from tests.support import random_sequences, tree_from_sequences
from tests.unit.plan.plans import random_plan, windowed_plan


def test_against_plain_sums() -> None:
    _, plan = random_plan(3, dp=3, slots=4)
    u = plan.units
    total = [f + b for f, b in zip(u.cost_forward.tolist(), u.cost_backward.tolist(), strict=True)]
    work = [sum(t for t, d in zip(total, u.replica.tolist(), strict=True) if d == r) for r in range(3)]
    spreads = []
    for r in range(3):
        mine = [t for t, d in zip(total, u.replica.tolist(), strict=True) if d == r]
        spreads.append(statistics.pstdev(mine) / statistics.mean(mine))
    phi = sum(
        max(cost[i] for i in range(len(u)) if u.slot[i] == j)
        for j in range(4)
        for cost in (u.cost_forward, u.cost_backward)
    )
    report = work_report(plan)
    assert report.replica_balance == pytest.approx(statistics.mean(work) / max(work))
    assert report.replica_range == pytest.approx((max(work) - min(work)) / statistics.mean(work))
    assert report.microbatch_spread == pytest.approx(statistics.mean(spreads))
    assert report.step_cost == pytest.approx(phi)
    assert report.second_forward_cost == 0
    assert report.peak_alive_tokens == u.padded_tokens.max()  # nothing is imported: one at a time


def test_producers_count_beside_the_microbatches() -> None:
    """They are work, are alive with each consumer of their window, and are no microbatch."""
    plan = windowed_plan()
    units = replace(
        plan.units, cost_forward=np.array([4.0, 1.0, 3.0]), cost_backward=np.array([8.0, 2.0, 6.0])
    )
    assert units.kind.tolist() == [PRODUCER, CONSUMER, CONSUMER]
    report = work_report(replace(plan, units=units))
    assert report.step_cost == 24
    assert report.second_forward_cost == 4  # the producer's
    assert report.microbatch_spread == pytest.approx(0.5)
    assert report.replica_balance == 1
    padded = units.padded_tokens
    assert report.peak_alive_tokens == padded[0] + padded[1:].max()


def test_chains_keep_their_microbatches_alive() -> None:
    tree = tree_from_sequences(random_sequences(np.random.default_rng(0), num_rows=30))
    plan = plan_tree(tree, PlanOptions(planner="psrl", dp=1, capacity=100))
    assert plan.num_units > 2
    report, units = work_report(plan), plan.units
    assert report.peak_alive_tokens > 100
    assert report.microbatch_spread < 0.05
    importers = unit_links(plan).importers
    awaited = [i for i in range(len(units)) if importers[i]]
    assert 0 < len(awaited) < len(units)
    assert report.second_forward_cost == pytest.approx(sum(units.cost_forward[awaited]))
    events = with_second_forwards(unit_events(unit_links(plan), range(plan.num_units)), "unit")
    assert awaited == sorted(event.unit for event in events if event.kind == "recompute")


def test_relative_range() -> None:
    assert relative_range(np.array([1.0, 2.0, 3.0])) == 1
