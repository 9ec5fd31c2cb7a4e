"""Exact contiguous partitions: the cut rows with the least total lcp under the capacity.

Splitting the sorted rows into K runs costs C(all) + Σ over cuts s of lcp[s]. With P the running total of
suffix tokens, the run [s, e) costs P[e] − P[s] + lcp[s], which falls as s rises, so the feasible s of an e
are the last few, and G[k, e] = min over them of G[k − 1, s] + lcp[s] is a sliding-window minimum: O(N) per k.
Only the (k, e) that both k runs from the left and the remaining ones from the right can reach are kept.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

UNREACHABLE = np.iinfo(np.int64).max // 4


def natural_runs(length: npt.NDArray[Any], lcp: npt.NDArray[Any], capacity: int) -> int:
    """The fewest contiguous runs within the capacity (greedy); every length ≤ capacity."""
    ends = _reach_right(*_running(length, lcp), capacity)
    return len(ends) - 1


def contiguous_partitions(
    length: npt.NDArray[Any], lcp: npt.NDArray[Any], *, capacity: int, counts: list[int]
) -> dict[int, tuple[int, npt.NDArray[np.int32]]]:
    """For each feasible count K: the least total compact tokens, and the run of each row.

    Args:
        length: int [N], rows in lexicographic order, each ≤ capacity.
        lcp: int [N], tokens shared with the row before; lcp[0] is taken as 0.
        capacity: T.
        counts: the K to solve for, 1 ≤ K ≤ N.
    """
    if not counts:
        return {}
    n, most = len(length), max(counts)
    total, shared = _running(length, lcp)
    right = _reach_right(total, shared, capacity)  # furthest end after k runs from the left
    left = _reach_left(total, shared, capacity)  # nearest start of the last k runs
    k = np.arange(most + 1)
    high = np.minimum(right[np.minimum(k, len(right) - 1)], n)
    low = np.maximum(left[np.minimum(most - k, len(left) - 1)], k)
    low[0] = high[0] = 0
    widths = np.maximum(high - low + 1, 0)
    offset = np.concatenate([[0], np.cumsum(widths)])
    cost, choice = _solve(total, shared, capacity, low, high, offset)
    result = {}
    for count in sorted(set(counts)):
        if cost[count] < UNREACHABLE:
            starts = _backtrack(choice, low, offset, count, n)
            runs = np.zeros(n, np.int32)
            runs[starts[1:]] = 1
            result[count] = (int(total[-1] + cost[count]), np.cumsum(runs, dtype=np.int32))
    return result


def _running(length: npt.NDArray[Any], lcp: npt.NDArray[Any]) -> tuple[Any, Any]:
    shared = lcp.astype(np.int64)
    shared[0] = 0
    total = np.concatenate([[0], np.cumsum(length.astype(np.int64) - shared)])
    return total, shared


@numba.njit(cache=True)
def _reach_right(total: Any, shared: Any, capacity: int) -> Any:
    n = len(shared)
    ends = [0]
    s = 0
    for e in range(1, n + 1):
        if total[e] - total[s] + shared[s] > capacity:
            s = e - 1
            ends.append(s)
    ends.append(n)
    return np.array(ends)


@numba.njit(cache=True)
def _reach_left(total: Any, shared: Any, capacity: int) -> Any:
    n = len(shared)
    starts = [n]
    e = n
    for s in range(n - 1, -1, -1):
        if total[e] - total[s] + shared[s] > capacity:
            e = s + 1
            starts.append(e)
    starts.append(0)
    return np.array(starts)


@numba.njit(cache=True)
def _solve(total: Any, shared: Any, capacity: int, low: Any, high: Any, offset: Any) -> Any:
    """(cost[k] of k runs over all rows, less P[N]; the last cut of every kept (k, e))."""
    n, most = len(shared), len(low) - 1
    cost = np.full(most + 1, UNREACHABLE, np.int64)
    choice = np.full(offset[-1], -1, np.int32)
    before = np.full(n + 1, UNREACHABLE, np.int64)
    now = np.full(n + 1, UNREACHABLE, np.int64)
    queue = np.empty(n + 1, np.int64)
    before[0] = 0
    for k in range(1, most + 1):
        front = back = 0
        s = low[k - 1]
        for e in range(low[k], high[k] + 1):
            while s < e and s <= high[k - 1]:
                if before[s] < UNREACHABLE:
                    value = before[s] + shared[s]
                    while back > front and before[queue[back - 1]] + shared[queue[back - 1]] >= value:
                        back -= 1
                    queue[back] = s
                    back += 1
                s += 1
            while back > front and total[e] - total[queue[front]] + shared[queue[front]] > capacity:
                front += 1
            if back > front:
                now[e] = before[queue[front]] + shared[queue[front]]
                choice[offset[k] + e - low[k]] = queue[front]
        for e in range(low[k - 1], high[k - 1] + 1):
            before[e] = UNREACHABLE
        if high[k] == n and high[k] >= low[k]:
            cost[k] = now[n]
        before, now = now, before
    return cost, choice


@numba.njit(cache=True)
def _backtrack(choice: Any, low: Any, offset: Any, count: int, n: int) -> Any:
    starts = np.empty(count, np.int64)
    e = n
    for k in range(count, 0, -1):
        e = choice[offset[k] + e - low[k]]
        starts[k - 1] = e
    return starts
