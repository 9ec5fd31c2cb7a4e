"""The segment tree of sorted trajectories, from (length, lcp) alone in one stack pass, O(N)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.trees.ragged import read_only


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentTree:
    """Maximal fork-free token paths in pre-order (a parent's index is below its children's).

    Attributes:
        parent: int32 [V], −1 at a root.
        start, stop: int32 [V], token positions [start, stop); start = the parent's stop, 0 at a root.
        row: int32 [V], a row (index into the arrays the tree was built from) that passes through the whole
            segment.
        row_segment: int32 [N], the segment that holds the row's last token.
    """

    parent: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    stop: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    row_segment: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        for name in ("parent", "start", "stop", "row", "row_segment"):
            object.__setattr__(self, name, read_only(np.asarray(getattr(self, name), np.int32)))

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def num_tokens(self) -> int:
        """Compact tokens of the tree."""
        return int((self.stop.astype(np.int64) - self.start).sum())


def build_segment_tree(length: npt.NDArray[Any], lcp: npt.NDArray[Any]) -> SegmentTree:
    """The segment tree of rows in lexicographic order.

    A segment is cut only where the tree forks, not where a row ends. Empty-suffix rows (duplicates) add
    nothing. For a subset of rows, pass the range minima of lcp.

    Args:
        length: int [N], tokens of each row, ≥ 1.
        lcp: int [N], tokens shared with the row before; lcp[0] is ignored (taken as 0).
    """
    length = np.ascontiguousarray(length, np.int32)
    lcp = np.ascontiguousarray(lcp, np.int32)
    entry, start, stop, row = _cut_segments(length, lcp)
    order = np.lexsort((start, entry))
    entry, start, stop, row = entry[order], start[order], stop[order], row[order]
    parent, row_segment = _link_segments(length, lcp, entry, start, stop)
    return SegmentTree(parent=parent, start=start, stop=stop, row=row, row_segment=row_segment)


@numba.njit(cache=True)
def _cut_segments(length: Any, lcp: Any) -> Any:
    """(entry, start, stop, row) of every segment, unordered.

    The stack holds the segments of the current row's path that may still be cut or extended. A row whose
    lcp falls on the end of a childless segment extends it (that segment's row ended there without a fork);
    ``extended_at`` and ``extended_from`` remember where, so that a later cut knows which row's tail holds
    each position. ``entry`` is the first row whose tail holds the segment's start, which with ``start``
    orders the segments into pre-order.
    """
    n = len(length)
    out_entry = np.empty(2 * n, np.int32)
    out_start = np.empty(2 * n, np.int32)
    out_stop = np.empty(2 * n, np.int32)
    out_row = np.empty(2 * n, np.int32)
    m = 0
    s_entry = np.empty(2 * n + 1, np.int32)
    s_start = np.empty(2 * n + 1, np.int32)
    s_stop = np.empty(2 * n + 1, np.int32)
    s_row = np.empty(2 * n + 1, np.int32)
    s_forks = np.zeros(2 * n + 1, np.bool_)
    extended_at = np.zeros(n, np.int32)
    extended_from = np.full(n, -1, np.int32)
    top = 0
    for i in range(n):
        l = lcp[i] if i else 0
        while top and s_start[top - 1] >= l:
            top -= 1
            out_entry[m], out_start[m] = s_entry[top], s_start[top]
            out_stop[m], out_row[m] = s_stop[top], s_row[top]
            m += 1
        if length[i] == l:
            continue  # a duplicate: no new token
        if top and s_stop[top - 1] == l and not s_forks[top - 1]:
            extended_at[i] = l
            extended_from[i] = s_row[top - 1]
            s_stop[top - 1] = length[i]
            s_row[top - 1] = i
            continue
        if top and s_stop[top - 1] > l:  # the fork lies inside the top segment: cut it
            r = s_row[top - 1]
            while extended_at[r] > l:
                r = extended_from[r]
            out_entry[m], out_start[m] = r, l
            out_stop[m], out_row[m] = s_stop[top - 1], s_row[top - 1]
            m += 1
            s_stop[top - 1] = l
            s_row[top - 1] = r
        if top:
            s_forks[top - 1] = True
        s_entry[top], s_start[top], s_stop[top], s_row[top] = i, l, length[i], i
        extended_at[i] = l
        s_forks[top] = False
        top += 1
    while top:
        top -= 1
        out_entry[m], out_start[m] = s_entry[top], s_start[top]
        out_stop[m], out_row[m] = s_stop[top], s_row[top]
        m += 1
    return out_entry[:m], out_start[:m], out_stop[:m], out_row[:m]


@numba.njit(cache=True)
def _link_segments(length: Any, lcp: Any, entry: Any, start: Any, stop: Any) -> Any:
    """(parent, row_segment) of segments in pre-order."""
    n, v = len(length), len(entry)
    parent = np.full(v, -1, np.int32)
    row_segment = np.empty(n, np.int32)
    path = np.empty(v, np.int32)
    top = 0
    j = 0
    for i in range(n):
        l = lcp[i] if i else 0
        while top and start[path[top - 1]] >= l:
            top -= 1
        while j < v and entry[j] == i:
            if top:
                parent[j] = path[top - 1]
            path[top] = j
            top += 1
            j += 1
        low, high = 0, top - 1  # the path's segment that holds the last token
        while low < high:
            middle = (low + high + 1) // 2
            if start[path[middle]] < length[i]:
                low = middle
            else:
                high = middle - 1
        row_segment[i] = path[low]
    return parent, row_segment
