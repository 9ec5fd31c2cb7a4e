"""LCP of any two rows of a rollout tree: range minima over the lcp column."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class LcpRanges:
    """Answers LCP(i, j) = min(lcp[i + 1 .. j]) for i < j, many pairs at a time.

    A sparse table: O(N log N) memory and time to make, O(1) per pair.

    Args:
        lcp: int32 [N], the lcp column.
    """

    def __init__(self, lcp: npt.NDArray[np.int32]) -> None:
        self._levels = [np.asarray(lcp, np.int32)]
        width = 1
        while 2 * width <= len(lcp):
            last = self._levels[-1]
            self._levels.append(np.minimum(last[:-width], last[width:]))
            width *= 2

    def between(self, i: npt.NDArray[Any], j: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """int64, tokens shared by rows i and j, elementwise; i < j."""
        i, j = np.asarray(i, np.int64), np.asarray(j, np.int64)
        out = np.empty(len(i), np.int64)
        level = np.frexp((j - i).astype(np.float64))[1] - 1  # floor of log2
        for k in np.unique(level).tolist():
            at = np.flatnonzero(level == k)
            table = self._levels[k]
            out[at] = np.minimum(table[i[at] + 1], table[j[at] - (1 << k) + 1])
        return out
