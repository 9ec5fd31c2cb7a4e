"""Planning as one call: a rollout tree and options in, a validated plan out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from harts_core.errors import ConfigError, InfeasiblePlanError
from harts_core.plan.build import finish_bundle
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.planners import PLANNERS, TOKEN_WISE_PLANNERS, WHOLE_ROW_PLANNERS, PlanProblem
from harts_core.plan.planners.split import plan_splitting
from harts_core.plan.validate import validate_plan
from harts_core.progress import Progress, no_progress
from harts_core.trees.rollout_tree import RolloutTree


def plan_tree(tree: RolloutTree, options: PlanOptions, progress: Progress = no_progress) -> PlanBundle:
    """Plan a rollout tree; the plan has passed the validator.

    Apart from ``runtime`` (clock times: plan_s, rounds_s, validate_s) it is a pure function of the
    tree and the options.

    Args:
        tree: a checked rollout tree.
        options: what to plan for.
        progress: told about the planner's search.

    Raises:
        ConfigError: no such planner, or an option that it does not support.
        InfeasiblePlanError: a trajectory is longer than the capacity, there are fewer trajectories than
            replicas, or no plan was found.
        InvalidPlanError: the planner broke a rule (a bug).
    """
    planner = PLANNERS.get(options.planner)
    if planner is None:
        raise ConfigError(f"no such planner: {options.planner}", hint=f"one of {', '.join(PLANNERS)}")
    rows, dropped = _select_rows(tree, options)
    clock = [time.perf_counter()]
    problem = PlanProblem.of_rows(
        tree,
        rows,
        dp=options.dp,
        capacity=options.capacity,
        seed=options.seed,
        pad=options.pad,
        producer_capacity=options.producer_capacity,
        max_live_producers=options.max_live_producers,
        max_window_slots=options.max_window_slots,
        cost_model=options.cost_model,
        effort=options.effort,
        time_budget_s=options.time_budget_s,
        search_budget=options.search_budget,
    )
    if problem.length.max() > problem.capacity and options.planner not in TOKEN_WISE_PLANNERS:
        layout = plan_splitting(problem, planner, progress)
    else:
        layout = planner(problem, progress)
    clock.append(time.perf_counter())
    bundle = finish_bundle(
        tree,
        layout,
        planner=options.planner,
        parameters=_parameters(options, dropped),
        cost_model=options.cost_model,
    )
    clock.append(time.perf_counter())
    validate_plan(bundle, tree)
    clock.append(time.perf_counter())
    seconds = dict(zip(("plan_s", "rounds_s", "validate_s"), np.diff(clock).tolist(), strict=True))
    return replace(bundle, runtime={**seconds, "planning_s": clock[-1] - clock[0]})


def _parameters(options: PlanOptions, dropped: list[int]) -> dict[str, Any]:
    windows = {} if options.max_window_slots is None else {"max_window_slots": options.max_window_slots}
    return {
        "dp": options.dp,
        "capacity": options.capacity,
        "pad": options.pad,
        "chunk": options.chunk,
        "seed": options.seed,
        "producer_capacity": options.producer_capacity or options.capacity,
        "max_live_producers": options.max_live_producers,
        **windows,
        "on_too_long": options.on_too_long,
        "dropped_rows": dropped,
    }


def _select_rows(tree: RolloutTree, options: PlanOptions) -> tuple[Any, list[int]]:
    """(rows to place, rows dropped for their length)."""
    split = options.on_too_long == "split"
    if split and options.planner in WHOLE_ROW_PLANNERS:
        raise ConfigError(
            f"--on-too-long split needs a planner that shares by prefix trees, not {options.planner}",
            hint="use --on-too-long drop, or raise --capacity",
        )
    too_long = np.flatnonzero((tree.length > options.capacity) & (not split))
    if len(too_long) and options.on_too_long == "error":
        named = ", ".join(f"{r} ({tree.length[r]:,} tokens)" for r in too_long[:5].tolist())
        more = f" and {len(too_long) - 5} more" if len(too_long) > 5 else ""
        raise InfeasiblePlanError(
            f"{len(too_long)} trajectories are longer than the capacity of {options.capacity:,} tokens",
            where=f"rows {named}{more}",
            hint=f"raise --capacity to {int(tree.length.max())}, or give --on-too-long split or drop",
        )
    rows = np.setdiff1d(np.arange(tree.num_rows), too_long).astype(np.int32)
    if len(rows) < options.dp:
        raise InfeasiblePlanError(
            f"{len(rows)} trajectories cannot give each of {options.dp} replicas one",
            hint=f"lower --dp to {len(rows)} or less" if len(rows) else "raise --capacity",
        )
    return rows, too_long.tolist()
