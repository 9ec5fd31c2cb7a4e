"""Semantic groups: the rows of one group_id."""

from __future__ import annotations

import numpy as np

from harts_core.plan.layout import run_starts
from harts_core.plan.planners.problem import Int32, Int64, PlanProblem
from harts_core.trees.neighbours import neighbour_lcp


def row_groups(problem: PlanProblem) -> Int64:
    """int64 [M], the group of each row; groups are numbered by their first rows."""
    names = np.array(problem.tree.group_id)[problem.rows]
    _, first, group = np.unique(names, return_index=True, return_inverse=True)
    return renumber(group, first)


def renumber(part: Int64, first: Int64) -> Int64:
    """Parts numbered by their first rows, given those."""
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[part]


def at_least(group: Int64, count: int) -> Int64:
    """int64 [M], the groups cut into at least ``count`` ≤ M pieces, numbered by their first rows.

    Whole groups where there are enough; else the group (or piece) with the most rows is halved in
    lexicographic order until there are.
    """
    members = [np.flatnonzero(group == g) for g in range(int(group.max()) + 1)]
    while len(members) < count:
        largest = int(np.argmax([len(m) for m in members]))
        rows = members[largest]
        members[largest] = rows[: len(rows) // 2]
        members.append(rows[len(rows) // 2 :])
    piece = np.empty(len(group), np.int64)
    for i, rows in enumerate(members):
        piece[rows] = i
    return renumber(piece, np.array([rows[0] for rows in members]))


def shared_in_group(problem: PlanProblem, group: Int64) -> Int32:
    """int32 [M], tokens that each row shares with the row of its group before it; 0 for the first."""
    order = np.argsort(group, kind="stable")
    shared = np.empty(len(group), np.int32)
    shared[order] = neighbour_lcp(problem.tree.lcp, problem.rows[order], run_starts(group[order]))
    return shared
