"""``--on-too-long split`` for any planner that shares by prefix trees: long trajectories in extra slots.

Trajectories longer than the capacity cannot be placed whole. They go, cut at tokens, into additional slots
behind the planner's own. A slot needs work on every replica, so replicas without long trajectories (or with
shorter ones) get ordinary rows for these slots; what is left goes to the planner as ever.
"""

from __future__ import annotations

import numpy as np

from harts_core.plan.layout import Layout, append_slots
from harts_core.plan.planners.groups import at_least, row_groups
from harts_core.plan.planners.packing import spread_heaviest_first
from harts_core.plan.planners.problem import Int32, Int64, Planner, PlanProblem
from harts_core.plan.planners.token_wise import layout_token_wise
from harts_core.progress import Progress

UNPLACED = -1


def plan_splitting(problem: PlanProblem, planner: Planner, progress: Progress) -> Layout:
    """Plan rows of which some are longer than the capacity.

    Args:
        problem: the problem; at least one row is too long.
        planner: for the rows that are placed whole; it shares by prefix trees ("tree").
        progress: told about the planner's search.

    Raises:
        InfeasiblePlanError: the planner finds no plan for the rows that it gets, or a replica has fewer
            tokens than another one needs microbatches.
    """
    worker = split_workers(problem)
    apart = worker != UNPLACED
    if np.count_nonzero(~apart) < problem.dp:  # too few for whole slots
        apart[:] = True
        worker = _place_rest(problem, worker)
    token_wise = layout_token_wise(problem.with_rows(problem.rows[apart]), worker[apart])
    if apart.all():
        return token_wise
    whole = planner(problem.with_rows(problem.rows[~apart]), progress)
    return append_slots(whole, token_wise, problem.dp)


def split_workers(problem: PlanProblem) -> Int32:
    """int32 [M], the worker of the rows that go into token-wise slots; UNPLACED: placed whole.

    Long rows go to workers group by group (groups halved where there are too few), the heaviest first, each
    to the one with the fewest tokens. Every worker then takes ordinary rows, in lexicographic order from
    behind its first long row on, where they share most with it, while that brings it closer to the tokens of
    the heaviest one. No worker stays without a row.
    """
    worker = np.full(len(problem.rows), UNPLACED, np.int32)
    long = np.flatnonzero(problem.length > problem.capacity)
    groups = at_least(row_groups(problem.with_rows(problem.rows[long])), min(problem.dp, len(long)))
    total = np.bincount(groups, problem.length[long])
    worker[long] = spread_heaviest_first(total, problem.dp)[groups]
    tokens = np.array([_tokens(problem, np.flatnonzero(worker == d)) for d in range(problem.dp)])
    heaviest = int(tokens.max())
    empty = int(np.count_nonzero(tokens == 0))
    at = 0  # workers without a long row go on where the one before them stopped
    for d in np.argsort(-tokens, kind="stable").tolist():
        mine = np.flatnonzero(worker == d)
        at = int(mine[0]) if len(mine) else at
        empty -= not len(mine)
        at = _fill(problem, worker, d, at, need=heaviest - int(tokens[d]), keep=empty)
    return worker


def _fill(problem: PlanProblem, worker: Int32, d: int, at: int, *, need: int, keep: int) -> int:
    """Give worker d rows from ``at`` on, cyclically; ``keep`` rows must stay. Returns where it stopped."""
    free = np.flatnonzero(worker == UNPLACED)
    free = np.roll(free, -int(np.searchsorted(free, at)))
    first = not (worker == d).any()
    for x in free[: max(0, len(free) - keep)].tolist():
        shared = int(problem.lcp[x]) if x and worker[x - 1] == d else 0
        added = int(problem.length[x]) - shared
        if not first and need < added / 2:
            break
        worker[x] = d
        need -= added
        first = False
        at = x + 1
    return at


def _tokens(problem: PlanProblem, mine: Int64) -> int:
    """Compact tokens of some rows."""
    if not len(mine):
        return 0
    chosen = problem.with_rows(problem.rows[mine])
    return int(chosen.length.sum() - chosen.lcp.astype(np.int64).sum())


def _place_rest(problem: PlanProblem, worker: Int32) -> Int32:
    """The rows left over, fewer than D: the longest first, each to the worker with the fewest tokens."""
    placed = worker.copy()
    left = np.flatnonzero(worker == UNPLACED)
    tokens = np.array([_tokens(problem, np.flatnonzero(worker == d)) for d in range(problem.dp)])
    for x in left[np.argsort(-problem.length[left], kind="stable")].tolist():
        d = int(np.argmin(tokens))
        placed[x] = d
        tokens[d] += problem.length[x]
    return placed
