"""psRL's placement: semantic groups to workers by longest processing time.

This planner places whole trajectories. Cutting them between microbatches, and importing what earlier
microbatches of the worker computed, is not part of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harts_core.plan.cost_model import CostModel
from harts_core.plan.layout import Layout
from harts_core.plan.planners.groups import at_least, row_groups, shared_in_group
from harts_core.plan.planners.packing import spread_heaviest_first
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.plan.planners.workers import layout_workers
from harts_core.progress import Progress


def plan_psrl(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan by psRL's placement (sharing "tree", no producers).

    Groups (halved where there are fewer than workers) go to the worker with the least work so far, the
    heaviest first; on a worker, microbatches of about equal work are cut in sequence order.

    Raises:
        InfeasiblePlanError: some worker needs more microbatches than the others have rows for.
    """
    group = row_groups(problem)
    work = sequence_work(problem.length, shared_in_group(problem, group), problem.cost_model)
    piece = at_least(group, problem.dp)
    total = np.bincount(piece, work)
    return layout_workers(problem, spread_heaviest_first(total, problem.dp)[piece], work)


def sequence_work(length: Int64, shared: Int32, cost_model: CostModel) -> npt.NDArray[np.float64]:
    """float64 [M], T(s) = α₁·l_suf·l + α₂·l_suf + α₃ of each sequence.

    l is its length and l_suf what it does not share with the sequence of its group before it. A token's and
    a query-key pair's cost, forward and backward together, give α₂ and α₁; the cost model has no cost per
    sequence, so α₃ = 0.

    Args:
        length, shared: int [M], l and l − l_suf.
        cost_model: the coefficients.
    """
    suffix = (length - shared).astype(np.float64)
    pair = cost_model.beta_forward + cost_model.beta_backward
    token = cost_model.alpha_forward + cost_model.alpha_backward
    return pair * suffix * length + token * suffix
