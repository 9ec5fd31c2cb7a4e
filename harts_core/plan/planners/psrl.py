"""psRL: semantic groups to workers by longest processing time, token-wise microbatches on each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harts_core.plan.cost_model import CostModel
from harts_core.plan.layout import Layout
from harts_core.plan.planners.groups import at_least, row_groups, shared_in_group
from harts_core.plan.planners.packing import spread_heaviest_first
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.plan.planners.token_wise import layout_token_wise
from harts_core.plan.planners.worker_tokens import work_coefficients
from harts_core.progress import Progress


def plan_psrl(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan as psRL does (sharing "tree", no producers; rows may be longer than the capacity).

    Groups (halved where there are fewer than workers) go to the worker with the least work so far, the
    heaviest first. Each worker's tokens are cut into microbatches of equal work at any token; later ones
    import what they need of earlier ones.

    Raises:
        InfeasiblePlanError: a worker has fewer tokens than another one needs microbatches.
    """
    return layout_token_wise(problem, place_groups(problem))


def place_groups(problem: PlanProblem) -> Int32:
    """int32 [M], the worker of each row: groups by longest processing time; none without a row."""
    piece = at_least(row_groups(problem), problem.dp)
    work = sequence_work(problem.length, shared_in_group(problem, piece), problem.cost_model)
    placed: Int32 = spread_heaviest_first(np.bincount(piece, work), problem.dp)[piece]
    return placed


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
    pair, token = work_coefficients(cost_model)
    return pair * suffix * length + token * suffix
