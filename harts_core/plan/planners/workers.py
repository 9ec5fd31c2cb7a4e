"""Layouts of planners that decide only each row's worker (replica): rows stay in sequence order on it."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.plan.layout import Layout
from harts_core.plan.planners.contiguous import natural_runs
from harts_core.plan.planners.greedy import align_count
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.trees.neighbours import neighbour_lcp

HALVINGS = 40
"""Bisection steps for the least work per microbatch."""


def layout_workers(problem: PlanProblem, worker: npt.NDArray[Any]) -> Layout:
    """The layout (sharing "tree", no producers) that a placement of rows on workers leads to.

    The worker that needs the most microbatches (rows in lexicographic order, as many as fit the capacity)
    decides the number of slots. Every worker's rows are then cut, in that order, into as many runs, with the
    fewest tokens in the heaviest one (a row counts with what it adds to those of its worker before it); slot
    j has the j-th run of every worker. A worker with fewer rows than slots takes rows from the worker with
    the most.

    Args:
        problem: the problem.
        worker: int [M], the worker of each row.

    Raises:
        InfeasiblePlanError: there are fewer rows than consumers.
    """
    members, num_slots = _fill_short_workers(
        problem, [np.flatnonzero(worker == d) for d in range(problem.dp)]
    )
    slot = np.empty(len(problem.rows), np.int32)
    replica = np.empty(len(problem.rows), np.int32)
    for d, mine in enumerate(members):
        length, lcp = _columns(problem, mine)
        own = (length - lcp).astype(np.float64)
        runs = equal_runs(length, lcp, own, capacity=problem.capacity, count=num_slots)
        slot[mine] = runs
        replica[mine] = d
    return problem.layout_at(slot, replica, sharing="tree")


def equal_runs(
    length: Int64, lcp: Int32, work: npt.NDArray[np.float64], *, capacity: int, count: int
) -> Int32:
    """int32 [n], rows cut in order into ``count`` runs within the capacity, the heaviest as light as can be.

    Args:
        length, lcp: int [n], of rows in lexicographic order.
        work: float64 [n], non-negative.
        capacity: T.
        count: between the natural number of runs and n.
    """
    low, high = float(work.max()), float(np.cumsum(work)[-1])  # summed one by one, as the cut does
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _cut(length, lcp, work, capacity, middle)[-1] < count:
            high = middle
        else:
            low = middle
    runs = _cut(length, lcp, work, capacity, high)
    return align_count(length, lcp, runs, count)


@numba.njit(cache=True)
def _cut(length: Any, lcp: Any, work: Any, capacity: int, most: float) -> Any:
    """int32 [n], the run of each row: a run ends where the tokens or the work would exceed their limits."""
    runs = np.empty(len(length), np.int32)
    run = 0
    tokens, load = np.int64(0), 0.0
    for i in range(len(length)):
        added = length[i] - lcp[i] if i else length[i]
        if i and (tokens + added > capacity or load + work[i] > most):
            run += 1
            tokens, load, added = np.int64(0), 0.0, length[i]
        tokens += added
        load += work[i]
        runs[i] = run
    return runs


def _columns(problem: PlanProblem, mine: Int64) -> tuple[Int64, Int32]:
    """(length, lcp) of some rows."""
    rows = problem.rows[mine]
    return problem.length[mine], neighbour_lcp(problem.tree.lcp, rows, np.arange(len(rows)) == 0)


def _fill_short_workers(problem: PlanProblem, members: list[Int64]) -> tuple[list[Int64], int]:
    """(rows of each worker, slots): at least as many rows as slots on every worker.

    The last row of the worker with the most rows moves to the one with the fewest. That never takes more
    slots: the giver's runs lose a row, and the taker has a run for each of its rows.
    """
    needed = [natural_runs(*_columns(problem, m), problem.capacity) if len(m) else 0 for m in members]
    num_slots = max(needed)
    if num_slots * problem.dp > len(problem.rows):
        raise problem.no_plan(num_slots * problem.dp)
    sizes = [len(m) for m in members]
    while min(sizes) < num_slots:
        most, fewest = int(np.argmax(sizes)), int(np.argmin(sizes))
        members[fewest] = np.sort(np.append(members[fewest], members[most][-1]))
        members[most] = members[most][:-1]
        sizes = [len(m) for m in members]
    return members, num_slots
