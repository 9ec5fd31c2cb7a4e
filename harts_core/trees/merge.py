"""Sorting and merging token sequences with longest common prefixes (LCP) carried along.

Both kernels rest on one fact. Let ``x`` be the row output last, ``a ≥ x`` and ``b ≥ x`` the heads of two
sorted inputs. If LCP(a, x) > LCP(b, x) then a < b and LCP(a, b) = LCP(b, x); only where the two LCPs are
equal are tokens compared, and only from that position on. So every token is compared about once per
sort, however long the shared prefixes are (LCP mergesort), and merging front-coded runs never needs the
tokens before a row's own LCP: front-coded input is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.trees.ragged import offsets_from_lengths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Front-coded rows in lexicographic token order; rows with equal tokens in any order.

    Attributes:
        source: int64 [n], which added trajectory each row is.
        length: int32 [n], tokens of the row.
        lcp: int32 [n], tokens shared with the row before; 0 for row 0.
        values: int32, the suffixes [lcp, length) one after the other: the trie's tokens.
    """

    source: npt.NDArray[np.int64]
    length: npt.NDArray[np.int32]
    lcp: npt.NDArray[np.int32]
    values: npt.NDArray[np.int32]

    def base(self) -> npt.NDArray[np.int64]:
        """int64 [n], where token 0 of each row would lie in ``values``: token t ≥ lcp is at base + t."""
        kept = offsets_from_lengths(self.length.astype(np.int64) - self.lcp)
        return np.asarray(kept[:-1] - self.lcp)


def sort_rows(
    values: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], source: npt.NDArray[np.int64]
) -> Run:
    """Sort rows by their tokens and front-code them.

    Args:
        values: int32, the rows' tokens one after the other.
        offsets: int64 [n + 1], row i is values[offsets[i]:offsets[i + 1]].
        source: int64 [n], carried along.
    """
    base = np.ascontiguousarray(offsets[:-1], np.int64)
    length = np.diff(offsets).astype(np.int32)
    order, lcp = _merge_sort(values, base, length)
    kept = offsets_from_lengths(length[order].astype(np.int64) - lcp)
    out = np.empty(int(kept[-1]), np.int32)
    _gather_suffixes(values, values, len(base), base, order, lcp, kept, out)
    return Run(source=source[order], length=length[order], lcp=lcp, values=out)


def merge_runs(a: Run, b: Run) -> Run:
    """One run of the rows of both; reads only the front-coded suffixes."""
    n, m = len(a.length), len(b.length)
    base = np.concatenate([a.base(), b.base()])
    length = np.concatenate([a.length, b.length])
    rows = np.arange(n + m, dtype=np.int64)
    order, lcp = np.empty(n + m, np.int64), np.empty(n + m, np.int32)
    _merge(a.values, b.values, base, length, rows[:n], a.lcp, rows[n:], b.lcp, order, lcp)
    kept = offsets_from_lengths(length[order].astype(np.int64) - lcp)
    out = np.empty(int(kept[-1]), np.int32)
    _gather_suffixes(a.values, b.values, n, base, order, lcp, kept, out)
    source = np.concatenate([a.source, b.source])[order]
    return Run(source=source, length=length[order], lcp=lcp, values=out)


@numba.njit(cache=True)
def _common_prefix(a: Any, at: Any, b: Any, bt: Any, limit: Any) -> Any:
    """Equal leading tokens of a[at:at + limit] and b[bt:bt + limit], 32 at a time (vectorised)."""
    i = 0
    while i + 32 <= limit:
        different = np.int32(0)
        for j in range(32):
            different |= a[at + i + j] ^ b[bt + i + j]
        if different != 0:
            break
        i += 32
    while i < limit and a[at + i] == b[bt + i]:
        i += 1
    return i


@numba.njit(cache=True)
def _merge(
    values_a: Any,
    values_b: Any,
    base: Any,
    length: Any,
    order_a: Any,
    lcp_a: Any,
    order_b: Any,
    lcp_b: Any,
    out_order: Any,
    out_lcp: Any,
) -> None:
    """Merge two sorted row lists; lcp_a[0] and lcp_b[0] are 0. ``order_*`` index ``base`` and ``length``."""
    n, m = len(order_a), len(order_b)
    i = j = k = 0
    shared_a = shared_b = np.int32(0)  # LCP of each head with the row output last
    while i < n and j < m:
        take_a = bool(shared_a > shared_b)
        if shared_a == shared_b:
            a, b = order_a[i], order_b[j]
            limit = min(length[a], length[b]) - shared_a
            same = _common_prefix(values_a, base[a] + shared_a, values_b, base[b] + shared_a, limit)
            both = np.int32(shared_a + same)
            if both == length[a]:
                take_a = True  # a is equal to b or its prefix
            elif both == length[b]:
                take_a = False
            else:
                take_a = bool(values_a[base[a] + both] < values_b[base[b] + both])
            if take_a:
                out_order[k], out_lcp[k] = a, shared_a
                shared_b = both
            else:
                out_order[k], out_lcp[k] = b, shared_b
                shared_a = both
        elif take_a:
            out_order[k], out_lcp[k] = order_a[i], shared_a
        else:
            out_order[k], out_lcp[k] = order_b[j], shared_b
        k += 1
        if take_a:
            i += 1
            if i < n:
                shared_a = lcp_a[i]
        else:
            j += 1
            if j < m:
                shared_b = lcp_b[j]
    while i < n:
        out_order[k], out_lcp[k] = order_a[i], shared_a
        k, i = k + 1, i + 1
        if i < n:
            shared_a = lcp_a[i]
    while j < m:
        out_order[k], out_lcp[k] = order_b[j], shared_b
        k, j = k + 1, j + 1
        if j < m:
            shared_b = lcp_b[j]


@numba.njit(cache=True)
def _merge_sort(values: Any, base: Any, length: Any) -> Any:
    """(order, lcp) of rows sorted by their tokens: bottom-up mergesort, O(tokens + n log n)."""
    n = len(base)
    order, lcp = np.arange(n), np.zeros(n, np.int32)
    next_order, next_lcp = np.empty(n, np.int64), np.empty(n, np.int32)
    width = 1
    while width < n:
        for low in range(0, n, 2 * width):
            middle, high = min(low + width, n), min(low + 2 * width, n)
            _merge(
                values,
                values,
                base,
                length,
                order[low:middle],
                lcp[low:middle],
                order[middle:high],
                lcp[middle:high],
                next_order[low:high],
                next_lcp[low:high],
            )
        order, next_order = next_order, order
        lcp, next_lcp = next_lcp, lcp
        width *= 2
    return order, lcp


@numba.njit(cache=True)
def _gather_suffixes(
    values_a: Any, values_b: Any, num_a: Any, base: Any, order: Any, lcp: Any, kept: Any, out: Any
) -> None:
    """Copy tokens [lcp, length) of every row to out[kept[i]:kept[i + 1]]; rows ≥ num_a lie in values_b."""
    for i in range(len(order)):
        row = order[i]
        start = base[row] + lcp[i]
        size = kept[i + 1] - kept[i]
        if row < num_a:
            out[kept[i] : kept[i + 1]] = values_a[start : start + size]
        else:
            out[kept[i] : kept[i + 1]] = values_b[start : start + size]
