"""Planners side by side on one rollout tree: what each reaches, what is possible, and how long it takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harts_core.errors import ConfigError, HartsError, InfeasiblePlanError, MissingBackendError
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.plan.planners import PLANNERS
from harts_core.progress import Progress, no_progress
from harts_core.trees.build import Trajectory, build_tree
from harts_core.trees.rollout_tree import RolloutTree

PLANS = "plans"
BOUNDED = {
    "within_compression": "bound_within",
    "decoder_compression": "bound_decoder",
    "effective_compression": "bound_decoder",
}
"""Metrics that have an upper bound, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """One planner in one setting.

    Attributes:
        planner, dp, seed: the setting.
        metrics: of its plan, which the validator accepted, as in plan.json; None: there is no plan.
        gaps: metric to 1 − value / bound, for the compressions that have a bound; None likewise.
        planning_s: seconds for placement, call plan, metrics and validation; None likewise.
        failure: why there is no plan; None if there is one.
    """

    planner: str
    dp: int
    seed: int
    metrics: dict[str, int | float] | None
    gaps: dict[str, float] | None
    planning_s: float | None
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Planners on one tree.

    Attributes:
        tree_sha256: of the tree's content.
        rows: trajectories of the tree.
        capacity: T.
        results: by replicas, then planner, then seed, in the order asked for.
    """

    tree_sha256: str
    rows: int
    capacity: int
    results: tuple[PlannerResult, ...]

    @property
    def num_plans(self) -> int:
        """How many of the results have a plan."""
        return sum(result.failure is None for result in self.results)


def compare_planners(
    tree: RolloutTree,
    *,
    planners: Sequence[str],
    dp: Sequence[int],
    seeds: Sequence[int],
    options: PlanOptions,
    progress: Progress = no_progress,
) -> Comparison:
    """Plan a tree with every planner, number of replicas and seed.

    A planner that finds no plan, or lacks its optional package, gives a result with the reason. Each planner
    plans a toy tree first, so that no time includes loading compiled code.

    Args:
        tree: the rollout tree.
        planners: names in ``harts_core.plan.planners.PLANNERS``.
        dp: numbers of replicas.
        seeds: of randomised searches.
        options: everything else; its planner, dp and seed are replaced.
        progress: told about the plans.

    Raises:
        ConfigError: no such planner, a value out of range, or nothing to compare.
        InvalidPlanError: a planner broke a rule (a bug).
    """
    unknown = [name for name in planners if name not in PLANNERS]
    if unknown:
        raise ConfigError(f"no such planner: {unknown[0]}", hint=f"one of {', '.join(PLANNERS)}")
    if not (planners and dp and seeds):
        raise ConfigError("name at least one planner, one number of replicas and one seed")
    settings = [
        replace(options, planner=planner, dp=replicas, seed=seed)
        for replicas in dict.fromkeys(dp)
        for planner in dict.fromkeys(planners)
        for seed in dict.fromkeys(seeds)
    ]
    for planner in dict.fromkeys(planners):
        _warm_up(replace(options, planner=planner, dp=2, capacity=40))
    results = []
    for done, setting in enumerate(settings):
        progress(PLANS, done, len(settings))
        results.append(_result(tree, setting))
    progress(PLANS, len(settings), len(settings))
    return Comparison(
        tree_sha256=tree.content_sha256,
        rows=tree.num_rows,
        capacity=options.capacity,
        results=tuple(results),
    )


def medians(results: Sequence[PlannerResult]) -> tuple[dict[str, float], float] | None:
    """(metrics, planning seconds): medians over the results that have a plan; None if none has.

    The gaps are among the metrics, as ``gap_within_compression`` and so on.
    """
    metrics = [
        r.metrics | {f"gap_{k}": v for k, v in r.gaps.items()} for r in results if r.metrics and r.gaps
    ]
    if not metrics:
        return None
    seconds = [r.planning_s for r in results if r.planning_s is not None]
    middle = {name: statistics.median(m[name] for m in metrics) for name in metrics[0]}
    return middle, statistics.median(seconds)


def _result(tree: RolloutTree, options: PlanOptions) -> PlannerResult:
    metrics: dict[str, Any] | None = None
    gaps = planning_s = failure = None
    try:
        bundle = plan_tree(tree, options)
    except (InfeasiblePlanError, MissingBackendError) as error:
        failure = _reason(error)
    else:
        metrics = bundle.metrics
        gaps = {name: 1 - metrics[name] / metrics[bound] for name, bound in BOUNDED.items()}
        planning_s = bundle.runtime["planning_s"]
    return PlannerResult(
        planner=options.planner,
        dp=options.dp,
        seed=options.seed,
        metrics=metrics,
        gaps=gaps,
        planning_s=planning_s,
        failure=failure,
    )


def _reason(error: HartsError) -> str:
    return "; ".join(filter(None, (error.what, error.where, error.hint)))


def _warm_up(options: PlanOptions) -> None:
    """Plan a toy tree, to load what the planner has compiled."""
    tree = build_tree(
        Trajectory(
            trajectory_id=str(i),
            group_id=str(i % 2),
            tokens=np.array([i % 2, *range(i), i]),
            loss_spans=np.array([[1, 2]]),
        )
        for i in range(12)
    )
    _result(tree, options)
