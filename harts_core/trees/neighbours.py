"""Prefixes shared by rows that need not be neighbours: range minima of lcp."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


def range_minimum(values: Int32, low: npt.NDArray[Any], high: npt.NDArray[Any]) -> Int32:
    """Minima of ``values[low:high]`` for many ranges, each non-empty; by doubling, O(N log N).

    Args:
        values: int32 [N].
        low, high: int [M], 0 ≤ low < high ≤ N.
    """
    result = np.empty(len(low), np.int32)
    level = np.frexp(high - low)[1] - 1  # floor(log2(high − low)), exact for integers below 2^53
    minima = values
    for k in range(int(level.max(initial=-1)) + 1):
        mine = np.flatnonzero(level == k)
        result[mine] = np.minimum(minima[low[mine]], minima[high[mine] - (1 << k)])
        minima = np.minimum(minima[: max(0, len(minima) - (1 << k))], minima[1 << k :])
    return result


def neighbour_lcp(lcp: Int32, rows: npt.NDArray[Any], first: npt.NDArray[np.bool_]) -> Int32:
    """Tokens that each listed row shares with the one listed before it; 0 where ``first``.

    Args:
        lcp: int32 [N], of the tree.
        rows: int [M], ascending within each run.
        first: bool [M], True where a run begins.
    """
    result = np.zeros(len(rows), np.int32)
    later = np.flatnonzero(~first)
    result[later] = range_minimum(lcp, rows[later - 1] + 1, rows[later] + 1)
    return result
