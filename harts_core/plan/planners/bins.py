"""Consumers as sorted bins of rows, with exact compact-token costs under insertion and removal.

Rows are numbered in lexicographic order. Inserting x between its sorted neighbours p and q in a bin adds
ΔC = |x| − LCP(p, x) − LCP(x, q) + LCP(p, q) tokens (an absent neighbour shares nothing).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt


class Bins(NamedTuple):
    """State of a partition; all arrays are changed in place by the functions below.

    Attributes:
        length: int64 [N], tokens of each row.
        minima: int32 [levels, N], minima[k, i] = min of lcp over rows [i, i + 2^k): range minima in O(1).
        level: int8 [N + 1], level[d] = ⌊log2 d⌋.
        of: int32 [N], the bin of each row, −1: not placed.
        before, after: int32 [N], the row's neighbours in its bin, −1: none.
        head: int32 [K], first row of each bin, −1: empty.
        size: int32 [K], rows of each bin.
        load: int64 [K], compact tokens of each bin.
    """

    length: npt.NDArray[np.int64]
    minima: npt.NDArray[np.int32]
    level: npt.NDArray[np.int8]
    of: npt.NDArray[np.int32]
    before: npt.NDArray[np.int32]
    after: npt.NDArray[np.int32]
    head: npt.NDArray[np.int32]
    size: npt.NDArray[np.int32]
    load: npt.NDArray[np.int64]


def empty_bins(length: npt.NDArray[Any], lcp: npt.NDArray[Any], num_bins: int) -> Bins:
    """Bins without rows.

    Args:
        length, lcp: int [N], of rows in lexicographic order.
        num_bins: K.
    """
    n = len(length)
    minima = [lcp.astype(np.int32)]
    while (1 << len(minima)) <= n:
        last, reach = minima[-1], 1 << (len(minima) - 1)
        level = last.copy()
        level[: n - reach] = np.minimum(last[: n - reach], last[reach:])
        minima.append(level)
    return Bins(
        length=length.astype(np.int64),
        minima=np.array(minima),
        level=(np.frexp(np.maximum(np.arange(n + 1), 1))[1] - 1).astype(np.int8),
        of=np.full(n, -1, np.int32),
        before=np.full(n, -1, np.int32),
        after=np.full(n, -1, np.int32),
        head=np.full(num_bins, -1, np.int32),
        size=np.zeros(num_bins, np.int32),
        load=np.zeros(num_bins, np.int64),
    )


def bins_of_partition(
    length: npt.NDArray[Any], lcp: npt.NDArray[Any], partition: npt.NDArray[np.int32], num_bins: int
) -> Bins:
    """The bins of a given partition.

    Args:
        length, lcp: int [N].
        partition: int32 [N], the bin of each row.
        num_bins: K > every bin.
    """
    bins = empty_bins(length, lcp, num_bins)
    _fill(bins, partition)
    return bins


@numba.njit(cache=True)
def _fill(bins: Any, partition: Any) -> None:
    last = np.full(len(bins.head), -1, np.int32)
    for x in range(len(partition)):  # ascending: each row goes behind the last of its bin
        b = partition[x]
        link_row(bins, x, b, last[b], -1)
        last[b] = x


@numba.njit(cache=True)
def shared_tokens(bins: Any, i: int, j: int) -> int:
    """LCP of rows i < j; 0 if either is −1."""
    if i < 0 or j < 0:
        return 0
    k = bins.level[j - i]
    return int(min(bins.minima[k, i + 1], bins.minima[k, j + 1 - (1 << k)]))


@numba.njit(cache=True)
def added_tokens(bins: Any, x: int, p: int, q: int) -> int:
    """ΔC of row x between neighbours p < x < q of one bin (−1: none)."""
    return int(
        bins.length[x] - shared_tokens(bins, p, x) - shared_tokens(bins, x, q) + shared_tokens(bins, p, q)
    )


@numba.njit(cache=True)
def neighbours(bins: Any, x: int, b: int) -> Any:
    """(p, q): the rows of bin b just below and above x, −1 where there is none. x is not in b."""
    p, q = -1, bins.head[b]
    while 0 <= q < x:
        p, q = q, bins.after[q]
    return p, q


@numba.njit(cache=True)
def link_row(bins: Any, x: int, b: int, p: int, q: int) -> None:
    """Insert x into bin b between its neighbours."""
    bins.load[b] += added_tokens(bins, x, p, q)
    bins.size[b] += 1
    bins.of[x] = b
    bins.before[x], bins.after[x] = p, q
    if p >= 0:
        bins.after[p] = x
    else:
        bins.head[b] = x
    if q >= 0:
        bins.before[q] = x


@numba.njit(cache=True)
def insert_row(bins: Any, x: int, b: int) -> None:
    """Insert x into bin b."""
    p, q = neighbours(bins, x, b)
    link_row(bins, x, b, p, q)


@numba.njit(cache=True)
def remove_row(bins: Any, x: int) -> None:
    """Take x out of its bin."""
    b, p, q = bins.of[x], bins.before[x], bins.after[x]
    bins.load[b] -= added_tokens(bins, x, p, q)
    bins.size[b] -= 1
    bins.of[x] = -1
    if p >= 0:
        bins.after[p] = q
    else:
        bins.head[b] = q
    if q >= 0:
        bins.before[q] = p
