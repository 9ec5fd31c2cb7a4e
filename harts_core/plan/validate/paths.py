"""Token paths by name: which prefixes of which rows are the same tokens, from the tree's lcp column alone."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.trees.rollout_tree import RolloutTree


class TokenPaths:
    """Names token prefixes: two rows have equal first ``depth`` tokens exactly if their names are equal.

    Rows are in lexicographic order, so the rows with one prefix of length p are a run without an lcp < p
    inside; its first row names it: the last row i ≤ row with lcp[i] < p.
    """

    def __init__(self, tree: RolloutTree) -> None:
        minima = [tree.lcp.astype(np.int32)]  # minima[k][i] = min lcp over the 2^k rows that end at i
        while (1 << len(minima)) <= tree.num_rows:
            last, reach = minima[-1], 1 << (len(minima) - 1)
            level = last.copy()
            level[reach:] = np.minimum(last[reach:], last[:-reach])
            minima.append(level)
        self._minima = np.array(minima)

    def name(self, row: npt.NDArray[Any], depth: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """int64 [M], the first row that has the same first ``depth`` ≥ 1 tokens (0 for depth 0).

        Args:
            row: int [M], rows of the tree.
            depth: int [M], 0 ≤ depth ≤ length[row].
        """
        named: npt.NDArray[np.int64] = _name(
            self._minima, np.ascontiguousarray(row, np.int64), np.ascontiguousarray(depth, np.int64)
        )
        return named


@numba.njit(cache=True)
def _name(minima: Any, row: Any, depth: Any) -> Any:
    result = np.zeros(len(row), np.int64)
    for m in range(len(row)):
        i = row[m]
        for k in range(len(minima) - 1, -1, -1):
            if i - (1 << k) >= 0 and minima[k, i] >= depth[m]:
                i -= 1 << k
        if depth[m] > 0:
            result[m] = i
    return result
