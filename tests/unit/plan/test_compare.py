"""Comparing planners: medians, and results without a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harts_core.errors import ConfigError
from harts_core.plan.cache_policy.report import memory_report
from harts_core.plan.cache_policy.whole_blocks import whole_block_tokens
from harts_core.plan.compare import PlannerResult, compare_planners, medians
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners import PLANNERS
from harts_core.plan.work import work_report
from tests.architecture.source import ROOT
from tests.support import random_sequences, tree_from_sequences


def result(value: float | None, seconds: float = 1.0) -> PlannerResult:
    return PlannerResult(
        planner="psrl",
        dp=1,
        seed=0,
        metrics=None if value is None else {"balance": value},
        gaps=None if value is None else {"within_compression": 1 - value},
        work=None,
        cache=None,
        planning_s=None if value is None else seconds,
        failure="why" if value is None else None,
    )


def test_medians_leave_out_what_has_no_plan() -> None:
    metrics, seconds = medians([result(0.9, 3), result(None), result(0.5, 1), result(0.6, 8)]) or ({}, 0)
    assert metrics == {"balance": 0.6, "gap_within_compression": pytest.approx(0.4)}
    assert seconds == 3
    assert medians([result(None)]) is None
    assert medians([]) is None


def test_repeated_names_count_once_and_reasons_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_from_sequences([[1, 2], [1, 3], [4]])
    calls = []
    comparison = compare_planners(
        tree,
        planners=["expanded", "psrl", "expanded"],
        dp=[1, 4, 1],
        seeds=[0],
        options=PlanOptions(dp=1, capacity=9),
        progress=lambda phase, done, total: calls.append((phase, done, total)),
    )
    assert [(r.dp, r.planner) for r in comparison.results] == [
        (1, "expanded"),
        (1, "psrl"),
        (4, "expanded"),
        (4, "psrl"),
    ]
    assert comparison.num_plans == 2
    failures: list[Any] = [r.failure for r in comparison.results]
    assert failures[:2] == [None, None]
    assert "cannot give each of 4 replicas one; lower --dp to 3 or less" in failures[2]
    assert calls == [("plans", done, 4) for done in range(5)]
    monkeypatch.setitem(__import__("sys").modules, "ortools", None)
    missing = compare_planners(
        tree, planners=["ortools-ffd"], dp=[1], seeds=[0], options=PlanOptions(dp=1, capacity=9)
    )
    assert "pip install ortools" in str(missing.results[0].failure)
    with pytest.raises(ConfigError, match="at least one planner"):
        compare_planners(tree, planners=[], dp=[1], seeds=[0], options=PlanOptions(dp=1, capacity=9))


def test_work_and_cache_are_those_of_the_plan() -> None:
    """Block sizes that are no default of the simulator, in the order asked for."""
    tree = tree_from_sequences(random_sequences(np.random.default_rng(2), num_rows=30))
    options = PlanOptions(planner="psrl", dp=2, capacity=100, chunk=4)
    plan = plan_tree(tree, options)
    found = compare_planners(
        tree, planners=["psrl"], dp=[2], seeds=[0], options=options, block_tokens=[24, 3, 24]
    )
    assert found.cache_unit == "tokens"
    result = found.results[0]
    assert result.work == work_report(plan)
    assert result.cache is not None
    assert [b.block_tokens for b in result.cache.blocks] == [None, 24, 3]
    report = memory_report(plan, tree=tree, fixed_sizes=[24, 3])
    assert result.cache.release_saving == report.release_saving > 0
    adaptive, *fixed = result.cache.blocks
    assert (adaptive.peak, adaptive.copied_tokens) == (report.policies[0].peak, 0)
    assert adaptive.decoder_compression == plan.metrics["decoder_compression"]
    expected = [p for p in report.policies if p.block_tokens is not None]
    for block, policy in zip(fixed, expected, strict=True):
        assert (block.peak, block.allocated, block.hit_rate, block.copied_tokens) == (
            policy.peak,
            policy.allocated,
            policy.hit_rate,
            policy.copied_tokens,
        )
        assert block.computed_tokens == whole_block_tokens(plan, block.block_tokens or 0)
        assert block.decoder_compression == plan.metrics["original_tokens"] / block.computed_tokens
        assert block.decoder_compression < adaptive.decoder_compression


def test_every_planner_is_on_its_page() -> None:
    page = (ROOT / "docs" / "planners.md").read_text(encoding="utf-8")
    assert [name for name in PLANNERS if f"| `{name}` |" not in page] == []
