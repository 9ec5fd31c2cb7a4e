"""Trie-aware greedy packing, not contiguous: rows go one by one where they cost or fit best."""

from __future__ import annotations

import heapq
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.plan.planners.bins import (
    added_tokens,
    bins_of_partition,
    empty_bins,
    insert_row,
    neighbours,
    remove_row,
)
from harts_core.plan.planners.rooms import empty_rooms, first_with_room, set_room

BEST_FIT, MAX_SHARED = 0, 1
REACH = 48
"""A row looks for bins at the rows up to this many places away in lexicographic order, where sharing is."""


def pack_greedily(
    length: npt.NDArray[Any],
    lcp: npt.NDArray[Any],
    *,
    order: npt.NDArray[Any],
    rule: int,
    capacity: int,
    dissolve: bool = True,
) -> npt.NDArray[np.int32]:
    """int32 [N], the bin of each row, numbered as they were opened; all are within the capacity, none empty.

    A row joins a bin of its lexicographic neighbours or the first bin with room for all of it, or opens a
    new one. Afterwards the lightest bins are dissolved where their rows cost no more elsewhere.

    Args:
        length, lcp: int [N], rows in lexicographic order, each length ≤ capacity.
        order: int [N], the order in which rows are placed.
        rule: BEST_FIT: the bin left with the least room; MAX_SHARED: the one where it adds the least.
        capacity: T.
        dissolve: whether to dissolve light bins.
    """
    bins = empty_bins(length, lcp, len(length))
    room = empty_rooms(len(length))
    num_bins = _pack(bins, np.asarray(order, np.int64), rule, capacity, room)
    if dissolve:
        _dissolve(bins, np.argsort(bins.load[:num_bins], kind="stable"), capacity, room)
    return np.unique(bins.of, return_inverse=True)[1].astype(np.int32)


def align_count(
    length: npt.NDArray[Any], lcp: npt.NDArray[Any], partition: npt.NDArray[np.int32], count: int
) -> npt.NDArray[np.int32]:
    """Split or merge bins until there are ``count`` of them; merged bins may exceed the capacity.

    Cutting a sorted bin between neighbours adds exactly the tokens that they share, whatever else is cut,
    so the cheapest cuts of all bins together are optimal. Merging joins the two lightest bins at a time.

    Args:
        length, lcp: int [N].
        partition: int32 [N], bins numbered 0, 1, … without gap.
        count: 1 ≤ count ≤ N.
    """
    num_bins = int(partition.max()) + 1
    if count < num_bins:
        return _merge_lightest(bins_of_partition(length, lcp, partition, num_bins).load, partition, count)
    order = np.lexsort((np.arange(len(partition)), partition))
    same = partition[order[1:]] == partition[order[:-1]]
    inner = np.flatnonzero(same)
    shared = _shared_pairs(empty_bins(length, lcp, 1), order[inner], order[inner + 1])
    cut = ~same
    cut[inner[np.argsort(shared, kind="stable")[: count - num_bins]]] = True
    result = np.empty(len(partition), np.int32)
    result[order] = np.concatenate([[0], np.cumsum(cut)])
    return result


def _merge_lightest(
    load: npt.NDArray[np.int64], partition: npt.NDArray[np.int32], count: int
) -> npt.NDArray[np.int32]:
    """Join the two lightest bins (by the sum of their tokens) until ``count`` are left."""
    heap = [(int(tokens), b) for b, tokens in enumerate(load)]
    heapq.heapify(heap)
    joined = np.arange(len(load))
    while len(heap) > count:
        (light, a), (heavy, b) = heapq.heappop(heap), heapq.heappop(heap)
        joined[joined == b] = a
        heapq.heappush(heap, (light + heavy, a))
    return np.unique(joined[partition], return_inverse=True)[1].astype(np.int32)


@numba.njit(cache=True)
def _shared_pairs(bins: Any, low: Any, high: Any) -> Any:
    result = np.empty(len(low), np.int64)
    for i in range(len(low)):
        result[i] = bins.length[high[i]] - added_tokens(bins, high[i], low[i], -1)
    return result


@numba.njit(cache=True)
def _choose(bins: Any, x: int, banned: int, rule: int, capacity: int, room: Any) -> Any:
    """(bin, ΔC) by the rule among the neighbours' bins and the first with room; (−1, 0): none fits."""
    n = len(bins.of)
    best, best_added, best_key = -1, 0, np.int64(0)
    for step in range(-1, 2 * REACH):
        if step < 0:
            b = first_with_room(room, bins.length[x])
        else:
            y = x - 1 - step // 2 if step % 2 == 0 else x + 1 + step // 2
            b = bins.of[y] if 0 <= y < n else -1
        if b < 0 or b in (banned, best):
            continue
        p, q = neighbours(bins, x, b)
        added = added_tokens(bins, x, p, q)
        left = capacity - bins.load[b] - added
        if left < 0:
            continue
        key = left if rule == BEST_FIT else added
        if best < 0 or key < best_key or (key == best_key and b < best):
            best, best_added, best_key = b, added, key
    return best, best_added


@numba.njit(cache=True)
def _pack(bins: Any, order: Any, rule: int, capacity: int, room: Any) -> int:
    num_bins = 0
    for x in order:
        b, _ = _choose(bins, x, -1, rule, capacity, room)
        if b < 0:
            b = num_bins
            num_bins += 1
        insert_row(bins, x, b)
        set_room(room, b, capacity - bins.load[b])
    return num_bins


@numba.njit(cache=True)
def _dissolve(bins: Any, order: Any, capacity: int, room: Any) -> None:
    """Empty bins, in the given order, whose rows all fit elsewhere at no more tokens in total."""
    for b in order:
        set_room(room, b, 0)
        rows = np.empty(bins.size[b], np.int64)
        x = bins.head[b]
        for i in range(len(rows)):
            rows[i] = x
            x = bins.after[x]
        saved = bins.load[b]
        added = 0
        moved = 0
        for x in rows:
            remove_row(bins, x)
            to, more = _choose(bins, x, b, MAX_SHARED, capacity, room)
            if to < 0 or added + more > saved:
                insert_row(bins, x, b)
                break
            insert_row(bins, x, to)
            set_room(room, to, capacity - bins.load[to])
            added += more
            moved += 1
        if moved < len(rows):
            for x in rows[:moved]:
                to = bins.of[x]
                remove_row(bins, x)
                set_room(room, to, capacity - bins.load[to])
                insert_row(bins, x, b)
            set_room(room, b, capacity - bins.load[b])
