"""Pipeline schedules of random plans: they run to their end, on 1 to 8 stages, within their limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.errors import InfeasiblePlanError
from harts_core.plan.bundle import CONSUMER, PRODUCER, PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.check import check_schedule
from harts_core.plan.schedule.pipeline import SCHEDULES, PipelineSchedule, ScheduleKind, pipeline_schedule
from harts_core.plan.schedule.timeline import simulate
from harts_core.plan.schedule.units import Event, peak_alive, unit_events, unit_links
from tests.support import random_sequences, tree_from_sequences
from tests.support_train import plan_of, random_tree
from tests.support_windows import chain_bundle, nested_bundle

SEEDS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(SCHEDULES)
STAGES = st.integers(1, 8)
LAGS = st.integers(1, 3)


def random_plan(rng: np.random.Generator) -> PlanBundle:
    """Without windows, with up to three levels of nested ones, or a chain; with random costs."""
    tree = random_tree(int(rng.integers(2**32)), num_rows=int(rng.integers(16, 30)))
    shape, slots = int(rng.integers(5)), int(rng.integers(1, 8))
    if shape == 0:
        return plan_of(tree, dp=2, slots=slots)
    if shape == 1:
        return chain_bundle(tree, units=int(rng.integers(1, 9)), chunk=4)
    outer = np.cumsum(rng.random(slots) < 0.4)
    levels, seed = int(rng.integers(1, 4)), int(rng.integers(2**32))
    return nested_bundle(tree, dp=2, slots=slots, levels=levels, chunk=4, seed=seed, outer=outer.tolist())


def nesting(bundle: PlanBundle, replica: int) -> int:
    """Most producers alive at once in the single process."""
    events = unit_events(unit_links(bundle), bundle.units_of_replica(replica).tolist())
    return peak_alive(events, bundle.units.kind == PRODUCER)


def consumers_in_flight(bundle: PlanBundle, events: tuple[Event, ...]) -> int:
    return peak_alive(events, bundle.units.kind == CONSUMER)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, num_stages=STAGES, kind=KINDS, lag=LAGS, training=st.booleans())
def test_every_schedule_is_valid(
    seed: int, num_stages: int, kind: ScheduleKind, lag: int, training: bool
) -> None:
    bundle = random_plan(np.random.default_rng(seed))
    for replica in range(bundle.dp):
        schedule = pipeline_schedule(
            bundle, num_stages=num_stages, replica=replica, kind=kind, lag=lag, training=training
        )
        check_schedule(bundle, schedule)
        assert schedule.max_live_producers == max(1, num_stages * nesting(bundle, replica))


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS, num_stages=STAGES, kind=KINDS, lag=LAGS, more=st.integers(0, 3))
def test_any_limit_on_producers_that_one_stage_meets(
    seed: int, num_stages: int, kind: ScheduleKind, lag: int, more: int
) -> None:
    bundle = random_plan(np.random.default_rng(seed))
    limit = max(1, nesting(bundle, 0)) + more
    schedule = pipeline_schedule(
        bundle, num_stages=num_stages, replica=0, kind=kind, lag=lag, max_live_producers=limit
    )
    assert schedule.max_live_producers == limit
    check_schedule(bundle, schedule)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, num_stages=STAGES, kind=KINDS, lag=LAGS)
def test_memory_of_a_stage(seed: int, num_stages: int, kind: ScheduleKind, lag: int) -> None:
    """With windows that do not nest: at most lag · (P − 1 − s) + 1 consumers and as many producers on
    stage s, and never more than P of these."""
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(1, 9))
    outer = np.cumsum(rng.random(slots) < 0.5)
    bundle = nested_bundle(
        random_tree(seed % 1000, num_rows=30),
        dp=2,
        slots=slots,
        levels=1,
        chunk=4,
        seed=seed % 997,
        outer=outer.tolist(),
    )
    producer = bundle.units.kind == PRODUCER
    schedule = pipeline_schedule(bundle, num_stages=num_stages, replica=1, kind=kind, lag=lag)
    for s, events in enumerate(schedule.stages):
        in_flight = lag * (num_stages - 1 - s) + 1
        assert consumers_in_flight(bundle, events) <= in_flight
        assert peak_alive(events, producer) <= min(in_flight, num_stages)
    if kind == "non-overlapping":
        assert all(peak_alive(events, producer) <= 1 for events in schedule.stages)


def reference_makespan(bundle: PlanBundle, schedule: PipelineSchedule) -> float:
    """The longest path through passes: after the one before on its stage and the neighbour's same pass."""
    P = schedule.num_stages
    cost = {"forward": bundle.units.cost_forward / P, "backward": bundle.units.cost_backward / P}
    lists = [[e for e in events if e.kind in cost] for events in schedule.stages]
    before = {
        (s, e.kind, e.unit): lists[s][i - 1] if i else None for s in range(P) for i, e in enumerate(lists[s])
    }
    memo: dict[tuple[int, str, int], float] = {}

    def end(s: int, kind: str, unit: int) -> float:
        key = (s, kind, unit)
        if key not in memo:
            earlier = before[key]
            start = end(s, earlier.kind, earlier.unit) if earlier else 0.0
            neighbour = s - 1 if kind == "forward" else s + 1
            if 0 <= neighbour < P:
                start = max(start, end(neighbour, kind, unit))
            memo[key] = start + float(cost[kind][unit])
        return memo[key]

    return max(end(s, e.kind, e.unit) for s in range(P) for e in lists[s])


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, num_stages=STAGES, lag=LAGS)
def test_timelines(seed: int, num_stages: int, lag: int) -> None:
    bundle = random_plan(np.random.default_rng(seed))
    work = (bundle.units.cost_forward + bundle.units.cost_backward)[bundle.units.replica == 0].sum()
    for kind in SCHEDULES:
        schedule = pipeline_schedule(bundle, num_stages=num_stages, replica=0, kind=kind, lag=lag)
        line = simulate(bundle, schedule)
        assert line.makespan == pytest.approx(reference_makespan(bundle, schedule), rel=1e-12)
        assert sum(line.busy) == pytest.approx(work, rel=1e-12)
        assert line.busy == pytest.approx([work / num_stages] * num_stages, rel=1e-12)
        assert line.bubble_share == pytest.approx(1 - work / num_stages / line.makespan, abs=1e-12)
        if num_stages == 1:
            assert line.makespan == pytest.approx(work, rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, num_stages=STAGES, planner=st.sampled_from(["harts", "psrl", "prefix-first"]))
def test_plans_of_planners(seed: int, num_stages: int, planner: str) -> None:
    rng = np.random.default_rng(seed)
    tree = tree_from_sequences(random_sequences(rng, num_rows=int(rng.integers(6, 30)), num_roots=2))
    capacity = int(tree.length.max()) + int(rng.integers(0, 60))
    try:
        bundle = plan_tree(tree, PlanOptions(planner=planner, dp=2, capacity=capacity, chunk=4))
    except InfeasiblePlanError:
        return
    for kind in SCHEDULES:
        for replica in range(2):
            check_schedule(
                bundle, pipeline_schedule(bundle, num_stages=num_stages, replica=replica, kind=kind)
            )
