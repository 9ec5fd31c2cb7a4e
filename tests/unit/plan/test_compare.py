"""Comparing planners: medians, and results without a plan."""

from __future__ import annotations

from typing import Any

import pytest

from harts_core.errors import ConfigError
from harts_core.plan.compare import PlannerResult, compare_planners, medians
from harts_core.plan.options import PlanOptions
from harts_core.plan.planners import PLANNERS
from tests.architecture.source import ROOT
from tests.support import tree_from_sequences


def result(value: float | None, seconds: float = 1.0) -> PlannerResult:
    return PlannerResult(
        planner="psrl",
        dp=1,
        seed=0,
        metrics=None if value is None else {"balance": value},
        gaps=None if value is None else {"within_compression": 1 - value},
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


def test_every_planner_is_on_its_page() -> None:
    page = (ROOT / "docs" / "planners.md").read_text(encoding="utf-8")
    assert [name for name in PLANNERS if f"| `{name}` |" not in page] == []
