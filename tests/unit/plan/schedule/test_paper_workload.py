"""What the schedules gain on a workload of the paper's shape: simulated, so the same on every machine."""

from __future__ import annotations

import pytest

from harts_core.plan.bundle import PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.schedule.report import pipeline_report
from harts_core.trees.build import build_tree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import workload_spec


@pytest.fixture(scope="module")
def bundle() -> PlanBundle:
    """Full-length rows, a seventh of the paper's; short windows."""
    tree = build_tree(generate(workload_spec(kind="tree-step", preset="paper", rows=240)))
    return plan_tree(tree, PlanOptions(dp=2, capacity=65_536, max_window_slots=3))


@pytest.mark.parametrize("stages", [2, 4])
def test_one_forward_one_backward_over_all_windows_is_fastest(bundle: PlanBundle, stages: int) -> None:
    _, apart, backward_first = pipeline_report(bundle, num_stages=stages).schedules
    assert apart.slowdown > 1.2
    assert backward_first.slowdown > 1.04  # 1.049 and 1.056: slots as even as these leave it little to lose


@pytest.mark.parametrize("stages", [2, 4])
def test_another_microbatch_in_reserve_is_faster(bundle: PlanBundle, stages: int) -> None:
    spans = [pipeline_report(bundle, num_stages=stages, lag=lag).schedules[0].makespan for lag in (1, 2)]
    assert spans[0] > 1.05 * spans[1]
