"""The planner without sharing: every trajectory in full, consumers filled by original tokens.

First-fit decreasing gives the number of consumers, rounded up to a multiple of D. The rows are then spread
over that many: longest first, each to the consumer with the fewest tokens; where that overflows the
capacity, the first-fit packing stays and its heaviest consumers are halved instead.
"""

from __future__ import annotations

import heapq
from typing import Any

import numba
import numpy as np

from harts_core.plan.layout import Layout
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.plan.planners.rooms import empty_rooms, first_with_room, set_room
from harts_core.progress import Progress


def plan_expanded(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan without sharing (sharing "none").

    Raises:
        InfeasiblePlanError: the rows need more consumers than there are rows for whole slots.
    """
    length, dp = problem.length, problem.dp
    longest_first = np.argsort(-length, kind="stable")
    fitted = _first_fit(length, longest_first, problem.capacity, empty_rooms(len(length)))
    natural = int(fitted.max()) + 1
    count = -(-natural // dp) * dp
    if count > len(length):
        raise problem.no_plan(natural)
    consumer, weight = _spread(length, longest_first, count)
    if weight.max() > problem.capacity:
        consumer, weight = _halve_heaviest(length, fitted, count)
    return problem.layout(consumer, weight, sharing="none")


@numba.njit(cache=True)
def _first_fit(length: Any, order: Any, capacity: int, rooms: Any) -> Any:
    consumer = np.empty(len(length), np.int32)
    left = np.empty(len(length), np.int64)
    count = 0
    for x in order:
        b = first_with_room(rooms, length[x])
        if b < 0:
            b = count
            left[b] = capacity
            count += 1
        left[b] -= length[x]
        set_room(rooms, b, left[b])
        consumer[x] = b
    return consumer


def _spread(length: Int64, order: Int64, count: int) -> tuple[Int32, Int64]:
    """Longest row first to the lightest consumer (ties: the lowest); none stays empty as count ≤ rows."""
    consumer = np.empty(len(length), np.int32)
    heap = [(0, b) for b in range(count)]
    for x in order.tolist():
        tokens, b = heap[0]
        consumer[x] = b
        heapq.heapreplace(heap, (tokens + int(length[x]), b))
    weight = np.zeros(count, np.int64)
    np.add.at(weight, consumer, length)
    return consumer, weight


def _halve_heaviest(length: Int64, fitted: Int32, count: int) -> tuple[Int32, Int64]:
    """Split the heaviest consumer that has two rows, its rows dealt out in turn, until there are enough."""
    members = [np.flatnonzero(fitted == b) for b in range(int(fitted.max()) + 1)]
    while len(members) < count:
        weight = [int(length[m].sum()) if len(m) > 1 else 0 for m in members]
        heaviest = int(np.argmax(weight))
        rows = members[heaviest][np.argsort(-length[members[heaviest]], kind="stable")]
        members[heaviest] = rows[::2]
        members.append(rows[1::2])
    consumer = np.empty(len(length), np.int32)
    for b, rows in enumerate(members):
        consumer[rows] = b
    return consumer, np.array([length[m].sum() for m in members], np.int64)
