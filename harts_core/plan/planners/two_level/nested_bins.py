"""Annealing items over nested bins: consumers inside windows inside replicas, all at once.

Every level is a partition of all items with its own trie tokens per bin, so each level's bins hold a copy of
every item: copy x + l·L is item x on level l. One :class:`Bins` then serves all levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.plan.planners.anneal import LOGARITHMS, STAGES, UNIT, _next
from harts_core.plan.planners.bins import bins_of_partition, insert_row, link_row, remove_row, shared_tokens

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
WEIGHT = 16
"""Unit of the levels' weights: a bin of weight 16 counts its tokens once."""
SWAPS, GROUPS = 6, 4
"""Of 16 moves, those that are swaps; of 16 rows that move, those that take their closest relatives along."""
MAX_GROUP = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BinLevel:
    """One level of bins and what its tokens cost.

    A bin with n tokens costs weight/16·n + stiffness·(n − target)²/target.

    Attributes:
        of_finest: int64 [F], the level's bin of each finest bin.
        target: int64 [bins], > 0, the tokens that a bin should have.
        weight, stiffness: as above.
    """

    of_finest: Int64
    target: Int64
    weight: int = 0
    stiffness: int = 0


def anneal_nested(
    length: Int64,
    lcp: Int32,
    start: Int32,
    levels: list[BinLevel],
    *,
    least_items: Int64,
    hot: int,
    cold: int,
    moves: int,
    seed: int,
) -> Int32:
    """The assignment of items to finest bins with the least cost that the search met.

    Args:
        length, lcp: int [L], items in lexicographic order.
        start: int32 [L], the finest bin of each item at the start, each with its least items.
        levels: the levels that cost something, in any order; the finest bins themselves may be one.
        least_items: int64 [F], items that each finest bin keeps, ≥ 1.
        hot, cold: temperatures at the start and the end, tokens.
        moves: how many moves are tried.
        seed: of the search.
    """
    finest = BinLevel(of_finest=np.arange(len(least_items)), target=np.ones(len(least_items), np.int64))
    levels = [finest, *levels]  # the finest level comes first: moves read their neighbours there
    counts = np.array([len(level.target) for level in levels])
    offset = np.concatenate([[0], np.cumsum(counts)])
    above = np.stack([level.of_finest + o for level, o in zip(levels, offset[:-1], strict=True)])
    costs = np.stack([
        np.concatenate([np.full(c, getattr(level, name)) for level, c in zip(levels, counts, strict=True)])
        for name in ("weight", "stiffness")
    ] + [np.concatenate([level.target for level in levels])])  # fmt: skip
    copies = len(levels)
    tiled = np.tile(lcp, copies)
    tiled[:: len(lcp)] = 0
    bins = bins_of_partition(
        np.tile(length, copies), tiled, np.concatenate(above[:, start]).astype(np.int32), int(offset[-1])
    )
    temperatures = np.round(np.geomspace(max(1, hot), max(1, cold), STAGES)).astype(np.int64)
    state = np.array([seed * 2 + 1], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    best: Int32 = _anneal(
        bins, len(lcp), above, costs.astype(np.int64), least_items, temperatures,
        max(1, moves // STAGES), state, LOGARITHMS,
    )  # fmt: skip
    return best


@numba.njit(cache=True)
def _cost(bins: Any, costs: Any, b: int) -> int:
    """16 times the cost of one bin."""
    n, target = bins.load[b], costs[2, b]
    return costs[0, b] * n + WEIGHT * costs[1, b] * ((n - target) * (n - target) // target)


@numba.njit(cache=True)
def _pair_cost(bins: Any, above: Any, costs: Any, a: int, b: int) -> int:
    """Costs of the bins, on all levels, that differ between finest bins a and b."""
    cost = np.int64(0)
    for l in range(len(above)):
        if above[l, a] != above[l, b]:
            cost += _cost(bins, costs, above[l, a]) + _cost(bins, costs, above[l, b])
    return cost


@numba.njit(cache=True)
def _insert_near(bins: Any, x: int, b: int, hint: int) -> None:
    """Insert x into bin b, looking for its place from ``hint``, a row that may be in the bin."""
    if hint < 0 or bins.of[hint] != b:
        insert_row(bins, x, b)
        return
    p, q = -1, hint
    if hint < x:
        while 0 <= q < x:
            p, q = q, bins.after[q]
    else:
        p = hint
        while p > x:
            p, q = bins.before[p], p
    link_row(bins, x, b, p, q)


@numba.njit(cache=True)
def _exchange(
    bins: Any, n: int, above: Any, moved: Any, count: int, returned: Any, back: int, a: int, b: int, hints: Any
) -> None:
    """Move ``count`` items from finest bin a to b, and ``back`` returned ones the other way.

    ``hints`` are items near the places where they go in a and in b.
    """
    for l in range(len(above)):
        if above[l, a] == above[l, b]:
            continue
        for i in range(count):
            remove_row(bins, moved[i] + l * n)
        for i in range(back):
            remove_row(bins, returned[i] + l * n)
        for i in range(back):
            _insert_near(bins, returned[i] + l * n, above[l, a], hints[0] + l * n)
        for i in range(count):
            _insert_near(bins, moved[i] + l * n, above[l, b], hints[1] + l * n)


@numba.njit(cache=True)
def _anneal(
    bins: Any, n: int, above: Any, costs: Any, least_items: Any, temperatures: Any, moves: int, state: Any,
    logarithms: Any,
) -> Any:  # fmt: skip
    energy, best_energy = np.int64(0), np.int64(0)
    best = bins.of[:n].copy()
    moved, returned = np.empty(MAX_GROUP + 1, np.int64), np.empty(MAX_GROUP + 1, np.int64)
    hints = np.empty(2, np.int64)
    for temperature in temperatures:
        for _ in range(moves):
            x = _next(state) % n
            hints[1] = _near(n, x, state)
            a = bins.of[x]
            b = bins.of[hints[1]] if hints[1] >= 0 else _next(state) % len(least_items)
            if a == b:
                continue
            count = _gather(bins, x, state, moved)
            back = 0
            hints[0] = bins.before[x] if bins.before[x] >= 0 else bins.after[x]
            if _next(state) % 16 < SWAPS:
                back = _gather(bins, _member(bins, b, state), state, returned)
            if bins.size[a] - count + back < least_items[a] or bins.size[b] - back + count < least_items[b]:
                continue
            before = _pair_cost(bins, above, costs, a, b)
            _exchange(bins, n, above, moved, count, returned, back, a, b, hints)
            change = _pair_cost(bins, above, costs, a, b) - before
            if change * UNIT > WEIGHT * temperature * logarithms[_next(state) % len(logarithms)]:
                _exchange(bins, n, above, moved, count, returned, back, b, a, hints[::-1])
                continue
            energy += change
            if energy < best_energy:
                best_energy = energy
                best[:] = bins.of[:n]
    return best


@numba.njit(cache=True)
def _near(n: int, x: int, state: Any) -> int:
    """Mostly a lexicographic neighbour of x, in whose bin there is something to share; else −1."""
    r = _next(state)
    distance = 1 + (r // 16) % 8
    y = x + distance if (r // 128) % 2 else x - distance
    return int(y) if r % 10 < 7 and 0 <= y < n else -1


@numba.njit(cache=True)
def _member(bins: Any, b: int, state: Any) -> int:
    """A random item of finest bin b."""
    y = bins.head[b]
    for _ in range(_next(state) % bins.size[b]):
        y = bins.after[y]
    return int(y)


@numba.njit(cache=True)
def _gather(bins: Any, x: int, state: Any, moved: Any) -> int:
    """Write items of one finest bin to ``moved`` and return their number: x alone, or x with all that share
    as much with it as its neighbour there does."""
    moved[0] = x
    count = 1
    kind = _next(state) % 16
    if kind >= GROUPS:
        return count
    p, q = bins.before[x], bins.after[x]
    level = shared_tokens(bins, p, x) if kind % 2 else shared_tokens(bins, x, q)
    if level == 0:
        return count
    while p >= 0 and count < MAX_GROUP and shared_tokens(bins, p, x) >= level:
        moved[count] = p
        count += 1
        p = bins.before[p]
    while q >= 0 and count < MAX_GROUP and shared_tokens(bins, x, q) >= level:
        moved[count] = q
        count += 1
        q = bins.after[q]
    return count
