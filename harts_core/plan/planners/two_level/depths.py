"""What producers hold, as depths: leading tokens of each item's path, closed under shared prefixes.

A choice of depths is *closed* in a group of items if any two items that share p tokens agree on
min(depth, p): then the chosen tokens form one forest, and their number follows from the neighbours alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.plan.layout import run_starts
from harts_core.trees.neighbours import neighbour_lcp

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Items by group, ascending in each.

    Attributes:
        order: int64 [L], the items.
        group: int64 [L], the group of each item (by item, not by order).
        first: bool [L], True in ``order`` where a group begins.
        lcp: int32 [L], tokens that each item in ``order`` shares with the one before it in its group.
        count: number of groups, empty ones included.
    """

    order: Int64
    group: Int64
    first: npt.NDArray[np.bool_]
    lcp: Int32
    count: int


def group_items(lcp: Int32, group: npt.NDArray[Any], count: int) -> Groups:
    """Items of each group in lexicographic order.

    Args:
        lcp: int32 [L], tokens that each item shares with the one before it.
        group: int [L], 0 ≤ group < count.
        count: number of groups.
    """
    group = group.astype(np.int64)
    order = np.argsort(group, kind="stable")
    first = run_starts(group[order])
    return Groups(order=order, group=group, first=first, lcp=neighbour_lcp(lcp, order, first), count=count)


def count_tokens(groups: Groups, depth: Int64, held: Int64 | None = None) -> Int64:
    """int64 [groups], tokens of each group's forest within ``depth`` and beyond ``held``; both closed."""
    total = np.zeros(groups.count, np.int64)
    _count_tokens(groups.order, groups.group, groups.first, groups.lcp, depth, total)
    if held is None:
        return total
    return total - count_tokens(groups, np.minimum(depth, held))


@numba.njit(cache=True)
def _count_tokens(order: Any, group: Any, first: Any, lcp: Any, depth: Any, total: Any) -> None:
    for k in range(len(order)):
        x = order[k]
        shared = 0 if first[k] else min(lcp[k], depth[x], depth[order[k - 1]])
        total[group[x]] += depth[x] - shared


def shared_depth(groups: Groups, part: npt.NDArray[Any]) -> Int64:
    """int64 [L], leading tokens that each item shares with an item of its group in another part.

    They are the tokens used by at least two parts of the group. The nearest such item on either side
    shares the most.

    Args:
        groups: the items by group.
        part: int [L], the part of each item.
    """
    depth = np.zeros(len(groups.order), np.int64)
    _shared_depth(groups.order, groups.first, groups.lcp, part.astype(np.int64), depth)
    return depth


@numba.njit(cache=True)
def _shared_depth(order: Any, first: Any, lcp: Any, part: Any, depth: Any) -> None:
    shared = np.int64(0)
    for k in range(1, len(order)):
        x, p = order[k], order[k - 1]
        if first[k]:
            shared = np.int64(0)
        else:
            shared = np.int64(lcp[k]) if part[x] != part[p] else min(shared, np.int64(lcp[k]))
            depth[x] = shared
    shared = np.int64(0)
    for k in range(len(order) - 2, -1, -1):
        x, q = order[k], order[k + 1]
        if first[k + 1]:
            shared = np.int64(0)
        else:
            shared = np.int64(lcp[k + 1]) if part[x] != part[q] else min(shared, np.int64(lcp[k + 1]))
            depth[x] = max(depth[x], shared)


def extend_depth(groups: Groups, depth: Int64, limit: Int64, budget: Int64) -> Int64:
    """int64 [L], ``depth`` extended in each group by its first ``budget`` tokens within ``limit``, in
    pre-order. The result is closed if ``depth`` and ``limit`` are.

    Args:
        groups: the items by group.
        depth, limit: int64 [L], closed; depth ≤ limit.
        budget: int64 [groups], tokens to add; all within the limit where there are fewer.
    """
    result = depth.copy()
    _extend_depth(groups.order, groups.group, groups.first, groups.lcp, limit, budget.copy(), result)
    return result


@numba.njit(cache=True)
def _extend_depth(order: Any, group: Any, first: Any, lcp: Any, limit: Any, budget: Any, depth: Any) -> None:
    for k in range(len(order)):
        x = order[k]
        if not first[k]:
            depth[x] = max(depth[x], min(np.int64(lcp[k]), depth[order[k - 1]]))
        more = min(budget[group[x]], limit[x] - depth[x])
        depth[x] += more
        budget[group[x]] -= more
