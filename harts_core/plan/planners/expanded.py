"""The planner without sharing: every trajectory in full, consumers filled by original tokens."""

from __future__ import annotations

import numpy as np

from harts_core.plan.layout import Layout
from harts_core.plan.planners.packing import first_fit_decreasing, pack_evenly
from harts_core.plan.planners.problem import PlanProblem
from harts_core.progress import Progress


def plan_expanded(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan without sharing (sharing "none"), see :mod:`harts_core.plan.planners.packing`.

    Raises:
        InfeasiblePlanError: the rows need more consumers than there are rows for whole slots.
    """
    length = problem.length
    fitted = first_fit_decreasing(length, problem.capacity)
    natural = int(fitted.max()) + 1
    count = problem.whole_slots(natural)
    if count > len(length):
        raise problem.no_plan(natural)
    consumer = pack_evenly(length, fitted, capacity=problem.capacity, count=count)
    weight = np.zeros(count, np.int64)
    np.add.at(weight, consumer, length)
    return problem.layout(consumer, weight, sharing="none")
