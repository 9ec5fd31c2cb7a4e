"""psRL: semantic groups to workers by longest processing time, token-wise microbatches on each."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from harts_core.plan.cost_model import CostModel
from harts_core.plan.layout import Layout
from harts_core.plan.planners.groups import row_groups
from harts_core.plan.planners.packing import spread_heaviest_first
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.plan.planners.token_wise import layout_token_wise
from harts_core.plan.planners.worker_tokens import work_coefficients
from harts_core.progress import Progress
from harts_core.trees.neighbours import neighbour_lcp


def plan_psrl(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan as psRL does (sharing "tree", no producers; rows may be longer than the capacity).

    Groups (the largest halved, ``place_groups``) go to the worker with the least work so far, the
    heaviest first. Each worker's tokens are cut into microbatches of equal work at any token; later ones
    import what they need of earlier ones.

    Raises:
        InfeasiblePlanError: a worker has fewer tokens than another one needs microbatches.
    """
    return layout_token_wise(problem, place_groups(problem))


def place_groups(problem: PlanProblem) -> Int32:
    """int32 [M], the worker of each row: groups by longest processing time; none without a row.

    A group with more than a worker's share of the work is halved, by work and in sequence order, until none
    has (a single sequence stays whole), and groups are while they are fewer than the workers. Each half
    computes what it shared with the other.
    """
    group = row_groups(problem)
    pieces = [np.flatnonzero(group == g) for g in range(int(group.max()) + 1)]
    work = [_work(problem, rows) for rows in pieces]
    share = sum(float(w.sum()) for w in work) / problem.dp
    heap = [(-float(w.sum()), i) for i, w in enumerate(work) if len(w) > 1]
    heapq.heapify(heap)
    while heap and (-heap[0][0] > share or len(pieces) < problem.dp):
        _, i = heapq.heappop(heap)
        running = np.cumsum(work[i])
        half = int(np.clip(np.searchsorted(running, running[-1] / 2) + 1, 1, len(running) - 1))
        pieces.append(pieces[i][half:])
        pieces[i] = pieces[i][:half]
        work[i] = work[i][:half]
        work.append(_work(problem, pieces[-1]))
        for part in (i, len(pieces) - 1):
            if len(pieces[part]) > 1:
                heapq.heappush(heap, (-float(work[part].sum()), part))
    worker = np.empty(len(problem.rows), np.int32)
    placed = spread_heaviest_first(np.array([float(w.sum()) for w in work]), problem.dp)
    for rows, d in zip(pieces, placed.tolist(), strict=True):
        worker[rows] = d
    return worker


def _work(problem: PlanProblem, rows: Int64) -> npt.NDArray[np.float64]:
    """float64, T(s) of some sequences placed together, apart from all others."""
    lcp = neighbour_lcp(problem.tree.lcp, problem.rows[rows], np.arange(len(rows)) == 0)
    return sequence_work(problem.length[rows], lcp, problem.cost_model)


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
