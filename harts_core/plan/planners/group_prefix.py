"""One common prefix per group: what trainers that share a prompt among its samples compute."""

from __future__ import annotations

import numpy as np

from harts_core.plan.layout import Layout, run_starts
from harts_core.plan.planners.groups import row_groups, shared_in_group
from harts_core.plan.planners.packing import first_fit_decreasing, pack_evenly
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.progress import Progress


def plan_group_prefix(problem: PlanProblem, progress: Progress) -> Layout:
    """Plan with one common prefix per group (sharing "group").

    A group is one piece if it fits the capacity, else several runs of its rows. A piece is taken to pay the
    group's prefix and the rest of every row (its rows may have more in common; then it pays less). Pieces are
    packed by :mod:`harts_core.plan.planners.packing`; the heaviest are halved where there are too few.

    Raises:
        InfeasiblePlanError: the rows need more consumers than there are rows for whole slots.
    """
    group = row_groups(problem)
    prefix = _group_prefixes(problem, group)
    members = _pieces(problem, group, prefix)
    while True:
        weight = np.array([_piece_tokens(problem, prefix[group[rows[0]]], rows) for rows in members])
        fitted = first_fit_decreasing(weight, problem.capacity)
        natural = int(fitted.max()) + 1
        count = problem.whole_slots(natural)
        if count > len(problem.rows):
            raise problem.no_plan(natural)
        if count <= len(members):
            break
        _halve_heaviest(members, weight)
    of_piece = pack_evenly(weight, fitted, capacity=problem.capacity, count=count)
    consumer = np.empty(len(group), np.int32)
    for i, rows in enumerate(members):
        consumer[rows] = of_piece[i]
    return problem.layout(consumer, group_tokens(problem, group, consumer, count), sharing="group")


def group_tokens(problem: PlanProblem, group: Int64, consumer: Int32, count: int) -> Int64:
    """int64 [K], compact tokens of consumers that share one common prefix per group.

    Args:
        group, consumer: int [M], of each row.
        count: K.
    """
    part = np.unique(consumer * (int(group.max()) + 1) + group, return_inverse=True)[1]
    tokens = np.zeros(count, np.int64)
    np.add.at(tokens, consumer, problem.length)
    prefix = _group_prefixes(problem, part)
    first = np.unique(part, return_index=True)[1]
    np.add.at(tokens, consumer[first], -prefix * (np.bincount(part) - 1))
    return tokens


def _group_prefixes(problem: PlanProblem, group: Int64) -> Int64:
    """int64 [groups], the prefix common to all rows of each group; a group of one: its row."""
    order = np.argsort(group, kind="stable")
    first = run_starts(group[order])
    own = np.where(first, problem.length[order], shared_in_group(problem, group)[order])
    return np.minimum.reduceat(own, np.flatnonzero(first))


def _piece_tokens(problem: PlanProblem, prefix: int, rows: Int64) -> int:
    return int(prefix + (problem.length[rows] - prefix).sum())


def _pieces(problem: PlanProblem, group: Int64, prefix: Int64) -> list[Int64]:
    """The rows of each piece: next fit in lexicographic order, group by group. That leaves more room than
    first-fit decreasing, but what lies together shares more."""
    order = np.argsort(group, kind="stable")
    shared = prefix[group[order]].tolist()
    own = (problem.length[order] - prefix[group[order]]).tolist()
    begins = run_starts(group[order]).tolist()
    cuts, tokens = [], 0
    for i in range(len(order)):
        if begins[i] or tokens + own[i] > problem.capacity:
            cuts.append(i)
            tokens = shared[i]
        tokens += own[i]
    return np.split(order, cuts[1:])


def _halve_heaviest(members: list[Int64], weight: Int64) -> None:
    """Halve the heaviest piece of several rows; there is one while there are fewer pieces than rows."""
    heaviest = int(np.argmax([w if len(m) > 1 else 0 for w, m in zip(weight, members, strict=True)]))
    rows = members[heaviest]
    members[heaviest] = rows[: len(rows) // 2]
    members.append(rows[len(rows) // 2 :])
