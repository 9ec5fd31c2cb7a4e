"""Reports of pipeline schedules, and their charts."""

from __future__ import annotations

import numpy as np
import pytest

from harts_cli.report.schedule_view import WIDTH, chart_lines, schedule_report
from harts_core.errors import ConfigError, InvalidPlanError
from harts_core.plan.bundle import CONSUMER
from harts_core.plan.schedule.pipeline import SCHEDULES, pipeline_schedule
from harts_core.plan.schedule.report import pipeline_report
from harts_core.plan.schedule.timeline import simulate
from tests.support_train import plan_of, random_tree
from tests.support_windows import nested_bundle
from tests.unit.plan.plans import windowed_plan, with_table

BUNDLE = nested_bundle(
    random_tree(3, num_rows=48), dp=2, slots=6, levels=1, chunk=4, seed=3, outer=[0, 0, 0, 1, 1, 1]
)


def test_a_plan_of_three_units_by_hand() -> None:
    """Costs forward 4, 1, 2 and backward 8, 2, 4; two stages halve them."""
    report = pipeline_report(windowed_plan(), num_stages=2, kinds=("harts",))
    (schedule,) = report.schedules
    assert [(p.stage, p.kind, p.unit, p.start, p.stop) for p in schedule.passes] == [
        (0, "forward", 0, 0.0, 2.0),
        (0, "forward", 1, 2.0, 2.5),
        (0, "forward", 2, 2.5, 3.5),
        (0, "backward", 1, 5.5, 6.5),
        (0, "backward", 2, 8.5, 10.5),
        (0, "backward", 0, 12.5, 16.5),
        (1, "forward", 0, 2.0, 4.0),
        (1, "forward", 1, 4.0, 4.5),
        (1, "backward", 1, 4.5, 5.5),
        (1, "forward", 2, 5.5, 6.5),
        (1, "backward", 2, 6.5, 8.5),
        (1, "backward", 0, 8.5, 12.5),
    ]
    assert schedule.makespan == 16.5
    assert schedule.bubble_share == pytest.approx(1 - 21 / 33)
    assert report.work == 10.5
    (replica,) = schedule.replicas
    assert replica.busy == (10.5, 10.5)
    assert replica.peak_producers == (1, 1)
    assert replica.peak_interface_tokens == (4, 4)
    assert replica.peak_activation_tokens == (12, 8)
    assert (report.producers, report.consumers) == ((0,), (1, 2))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("lag", [1, 2])
def test_units_of_equal_cost(num_stages: int, lag: int) -> None:
    """A pipeline loses P − 1 units once (harts), or in each of its two windows (non-overlapping)."""
    consumer = (BUNDLE.units.kind == CONSUMER).astype(float)
    even = with_table(BUNDLE, "units", cost_forward=consumer, cost_backward=2 * consumer)
    report = pipeline_report(even, num_stages=num_stages, lag=lag)
    spans = [s.makespan * num_stages / 3 for s in report.schedules]
    assert spans[0] == pytest.approx(6 + num_stages - 1)
    assert spans[1] == pytest.approx(6 + 2 * (num_stages - 1))
    assert spans[0] <= spans[2] * (1 + 1e-12)


def test_the_slowest_replica_is_drawn_and_decides() -> None:
    report = pipeline_report(BUNDLE, num_stages=3)
    assert [s.kind for s in report.schedules] == list(SCHEDULES)
    for s in report.schedules:
        lines = [
            simulate(BUNDLE, pipeline_schedule(BUNDLE, num_stages=3, replica=d, kind=s.kind))
            for d in range(2)
        ]
        assert [r.makespan for r in s.replicas] == [line.makespan for line in lines]
        assert s.makespan == max(line.makespan for line in lines)
        assert s.slowdown == s.makespan / report.schedules[0].makespan
        assert s.passes == lines[report.replica].passes
        assert s.bubble_share in [line.bubble_share for line in lines]
    first = report.schedules[0].replicas
    assert first[report.replica].makespan == max(r.makespan for r in first)
    assert pipeline_report(BUNDLE, num_stages=3, replica=1).replica == 1
    only = pipeline_report(BUNDLE, num_stages=3, kinds=("non-overlapping",))
    assert only.schedules[0].slowdown == report.schedules[1].slowdown > 1


def test_wrong_plans_and_replicas() -> None:
    with pytest.raises(ConfigError, match="no replica 2"):
        pipeline_report(BUNDLE, num_stages=2, replica=2)
    cost = np.array(BUNDLE.units.cost_forward)
    for value in (np.nan, np.inf, -1.0):
        cost[3] = value
        with pytest.raises(InvalidPlanError, match="cost_forward is not a number ≥ 0") as caught:
            pipeline_report(with_table(BUNDLE, "units", cost_forward=cost), num_stages=2)
        assert caught.value.where == "unit 3"
    owner = np.array(BUNDLE.spans.owner)
    owner[0] = 99
    with pytest.raises(InvalidPlanError, match="no such owner"):
        pipeline_report(with_table(BUNDLE, "spans", owner=owner), num_stages=2)
    owner[0] = int(np.flatnonzero(BUNDLE.units.order == BUNDLE.units.order.max())[0])
    with pytest.raises(InvalidPlanError, match="does not run before"):
        pipeline_report(with_table(BUNDLE, "spans", owner=owner), num_stages=2)


def test_charts_are_to_scale() -> None:
    report = pipeline_report(windowed_plan(), num_stages=2, kinds=("harts",))
    text = chart_lines(report, report.schedules[0], 16.5 * WIDTH / 33)  # two cells a unit of time
    assert text == (
        "stage 0 PPPPFff····BB····bbbb····QQQQQQQQ",
        "stage 1 ····PPPPFBBffbbbbQQQQQQQQ········",
    )
    (section,) = (s for s in schedule_report("plan", report).sections if s.title.startswith("harts"))
    assert "replica 0" in section.title


def test_a_plan_that_costs_nothing() -> None:
    bundle = plan_of(random_tree(1), slots=2)
    zero = np.zeros(bundle.num_units)
    report = pipeline_report(with_table(bundle, "units", cost_forward=zero, cost_backward=zero), num_stages=2)
    assert all(s.makespan == 0 and s.slowdown == 1 and s.bubble_share == 0 for s in report.schedules)
    assert chart_lines(report, report.schedules[0], 0.0) == ("stage 0 ", "stage 1 ")
    assert len(report.consumers) == (bundle.units.kind == CONSUMER).sum()
