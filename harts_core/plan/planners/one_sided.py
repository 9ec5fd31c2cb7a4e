"""Two placements that look at one thing only: prefixes, or balance. What lies between them is planning."""

from __future__ import annotations

from harts_core.plan.layout import Layout
from harts_core.plan.planners.groups import at_least, row_groups
from harts_core.plan.planners.packing import spread_heaviest_first
from harts_core.plan.planners.problem import PlanProblem
from harts_core.plan.planners.workers import layout_workers
from harts_core.progress import Progress


def plan_prefix_first(problem: PlanProblem, progress: Progress) -> Layout:
    """Prefixes alone: groups in lexicographic order, where those with a common prefix are neighbours, are
    dealt to the workers in runs of equally many, whatever they weigh (sharing "tree").

    Raises:
        InfeasiblePlanError: some worker needs more microbatches than the others have rows for.
    """
    piece = at_least(row_groups(problem), problem.dp)
    return layout_workers(problem, piece * problem.dp // (int(piece.max()) + 1))


def plan_balance_first(problem: PlanProblem, progress: Progress) -> Layout:
    """Balance alone: trajectories by decreasing length, each to the worker with the fewest tokens so far,
    whatever they share; in a microbatch, what meets there is shared (sharing "tree").

    Raises:
        InfeasiblePlanError: some worker needs more microbatches than the others have rows for.
    """
    return layout_workers(problem, spread_heaviest_first(problem.length, problem.dp))
