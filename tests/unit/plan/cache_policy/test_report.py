"""The report of a cache, on rollouts of the tree-step shape, and its bytes."""

from __future__ import annotations

import functools
from dataclasses import fields

import numpy as np
import pytest

from harts_core.exec.cache_bytes import cache_row_bytes
from harts_core.exec.model.config import PRESETS
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.cache_policy.report import MemoryReport, PolicyReport, memory_report
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.build import build_tree
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.synth import generate, workload_spec


@functools.cache
def tree_step() -> RolloutTree:
    return build_tree(list(generate(workload_spec(kind="tree-step", rows=300, seed=0))))


@functools.cache
def plan(planner: str) -> PlanBundle:
    return plan_tree(tree_step(), PlanOptions(planner=planner, dp=2, capacity=512))


def adaptive(report: MemoryReport) -> tuple[PolicyReport, PolicyReport]:
    return report.policies[0], report.policies[1]


@pytest.mark.parametrize("bytes_of_model", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
def test_just_in_time_release_on_the_tree_step_shape(bytes_of_model: bool, forward_only: bool) -> None:
    """At least 54 % less than without release, for psRL's chains; the bound is the paper's."""
    options = {}
    if bytes_of_model:
        options = {"row_bytes": cache_row_bytes(PRESETS["ling-3.0-tiny"], "bfloat16"), "tree": tree_step()}
    report = memory_report(plan("psrl"), forward_only=forward_only, **options)  # type: ignore[arg-type]
    just_in_time, kept = adaptive(report)
    assert report.release_saving == 1 - just_in_time.peak / kept.peak
    assert report.release_saving >= 0.54


@pytest.mark.parametrize("planner", ["psrl", "harts"])
def test_adaptive_is_the_least(planner: str) -> None:
    report = memory_report(
        plan(planner), row_bytes=cache_row_bytes(PRESETS["ling-3.0-tiny"], "bfloat16"), tree=tree_step()
    )
    first = report.policies[0]
    fixed = [p for p in report.policies if p.block_tokens is not None]
    assert [p.block_tokens for p in fixed] == [1, 16, 32, 128, 512]
    for p in fixed:
        assert np.all(np.array(first.timeline) <= p.timeline)
        assert first.peak <= p.peak
        assert first.allocated <= p.allocated
        assert first.copied_tokens == 0 <= p.copied_tokens
    rates = [p.hit_rate for p in fixed]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1
    farthest, lru = report.policies[-2:]
    assert farthest.budget == lru.budget == max(first.timeline) // 2
    assert farthest.offloaded <= lru.offloaded


def test_a_plan_without_imports() -> None:
    report = memory_report(plan("harts-l1"))
    assert report.imported_tokens == report.cached_tokens == 0
    assert {p.peak for p in report.policies} == {0}
    assert report.release_saving == 0


def test_row_bytes_of_a_rank() -> None:
    """Heads are split over tensor-parallel ranks, hidden states are not; gradients have the state dtype."""
    sizes = cache_row_bytes(PRESETS["ling-3.0-tiny"], "bfloat16")
    half = cache_row_bytes(PRESETS["ling-3.0-tiny"], "bfloat16", tensor_parallel=2)
    assert sizes.keys == 2 * half.keys
    assert sizes.states == 2 * half.states
    assert sizes.hidden == half.hidden
    config = PRESETS["ling-3.0-tiny"]
    stages = [
        cache_row_bytes(config, "bfloat16", layers=range(5), has_head=False),
        cache_row_bytes(config, "bfloat16", layers=range(5, config.num_hidden_layers)),
    ]
    for f in fields(sizes):
        assert getattr(sizes, f.name) == sum(getattr(stage, f.name) for stage in stages)
    assert sizes.keys_gradient == 2 * sizes.keys
    assert sizes.states_gradient == sizes.states
