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

from harts_core.plan.planners.anneal import (
    LOGARITHMS,
    MAX_GROUP,
    STAGES,
    SWAPS,
    UNIT,
    below,
    gather_relatives,
    member_of_bin,
    neighbours_without,
    next_random,
)
from harts_core.plan.planners.bins import (
    added_tokens,
    bins_of_partition,
    link_row,
    neighbours,
    remove_row,
)

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
WEIGHT = 16
"""Unit of the levels' weights: a bin of weight 16 counts its tokens once."""
NEAR = 5
"""Of 8 moves, those towards a lexicographic neighbour's bin."""


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
    """Anneal the assignment of items to finest bins towards the least cost.

    Of the assignments that the search ends its stages with, the one with the least bins·max + Σ of the
    tokens of the first level's bins is returned: what a step pays when it is even, and what it computes.

    Args:
        length, lcp: int [L], items in lexicographic order.
        start: int32 [L], the finest bin of each item at the start, none empty.
        levels: the levels that cost something; the finest bins themselves may be one.
        least_items: int64 [F], ≥ 1, items that a finest bin keeps if it has them.
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
def _cost(costs: Any, b: int, tokens: Any) -> Any:
    """16 times the cost of bin b with so many tokens."""
    target = costs[2, b]
    return costs[0, b] * tokens + WEIGHT * costs[1, b] * ((tokens - target) * (tokens - target) // target)


@numba.njit(cache=True)
def _anneal(
    bins: Any, n: int, above: Any, costs: Any, least_items: Any, temperatures: Any, moves: int, state: Any,
    logarithms: Any,
) -> Any:  # fmt: skip
    """The assignment with the least bins·max + Σ on the first level, of those at the stages' ends."""
    first, num_first = len(least_items), above[1].max() + 1 - len(least_items)
    best, best_paid = bins.of[:n].copy(), np.int64(2) ** 62
    moved, returned = np.empty(MAX_GROUP + 1, np.int64), np.empty(MAX_GROUP + 1, np.int64)
    for temperature in temperatures:
        for _ in range(moves):
            r, s = next_random(state), next_random(state)
            x = below(r, n)
            hint = _near(n, x, (r >> 32) & 127)
            a = bins.of[x]
            b = bins.of[hint] if hint >= 0 else below(s, len(least_items))
            if a == b:
                continue
            count = gather_relatives(bins, x, (r >> 40) & 15, moved)
            back = 0
            if (r >> 44) & 15 < SWAPS:
                y = member_of_bin(bins, b, (s >> 32) & 0xFFFF)
                back = gather_relatives(bins, y, (r >> 48) & 15, returned)
            if back < count and bins.size[a] - count + back < least_items[a]:
                continue
            if count < back and bins.size[b] - back + count < least_items[b]:
                continue
            near_a = bins.before[x] if bins.before[x] >= 0 else bins.after[x]
            alone = count == 1 and back <= 1
            if alone:
                y = returned[0] if back else -1
                change = _change(bins, n, above, costs, x, y, a, b, near_a, hint)
            else:
                change = -_pair_cost(bins, above, costs, a, b)
                _exchange(bins, n, above, moved, count, returned, back, a, b, near_a, hint)
                change += _pair_cost(bins, above, costs, a, b)
            accepted = change * UNIT <= WEIGHT * temperature * logarithms[(s >> 48) & 1023]
            if accepted and alone:
                _exchange(bins, n, above, moved, count, returned, back, a, b, near_a, hint)
            elif not accepted and not alone:
                _exchange(bins, n, above, moved, count, returned, back, b, a, hint, near_a)
        loads = bins.load[first : first + num_first]
        paid = num_first * loads.max() + loads.sum()
        if paid < best_paid:
            best_paid = paid
            best[:] = bins.of[:n]
    return best


@numba.njit(cache=True)
def _near(n: int, x: int, bits: Any) -> Any:
    """Mostly a lexicographic neighbour of x, in whose bin there is something to share; else −1."""
    if bits & 7 >= NEAR:
        return -1
    distance = 1 + ((bits >> 3) & 7)
    y = x + distance if bits >> 6 else x - distance
    return y if 0 <= y < n else -1


@numba.njit(cache=True)
def _pair_cost(bins: Any, above: Any, costs: Any, a: int, b: int) -> Any:
    """Costs of the bins, on all levels, that differ between finest bins a and b."""
    cost = np.int64(0)
    for l in range(len(above)):
        if above[l, a] != above[l, b]:
            for c in (above[l, a], above[l, b]):
                cost += _cost(costs, c, bins.load[c])
    return cost


@numba.njit(cache=True)
def _change(
    bins: Any, n: int, above: Any, costs: Any, x: int, y: int, a: int, b: int, near_a: int, near_b: int
) -> Any:
    """What it costs to move item x from finest bin a to b, and y (−1: none) the other way."""
    change = np.int64(0)
    for l in range(len(above)):
        of_a, of_b, shift = above[l, a], above[l, b], l * n
        if of_a == of_b:
            continue
        out = x + shift
        load_a = bins.load[of_a] - added_tokens(bins, out, bins.before[out], bins.after[out])
        load_b = bins.load[of_b]
        p, q = _neighbours_near(bins, out, of_b, near_b + shift if near_b >= 0 else -1)
        if y >= 0:
            back = y + shift
            load_b -= added_tokens(bins, back, bins.before[back], bins.after[back])
            p, q = neighbours_without(bins, back, p, q)
            s, t = _neighbours_near(bins, back, of_a, near_a + shift if near_a >= 0 else -1)
            s, t = neighbours_without(bins, out, s, t)
            load_a += added_tokens(bins, back, s, t)
        load_b += added_tokens(bins, out, p, q)
        change += _cost(costs, of_a, load_a) - _cost(costs, of_a, bins.load[of_a])
        change += _cost(costs, of_b, load_b) - _cost(costs, of_b, bins.load[of_b])
    return change


@numba.njit(cache=True)
def _neighbours_near(bins: Any, x: int, b: int, hint: int) -> Any:
    """Neighbours of x in bin b, looked for from ``hint``, a row that may be in the bin (−1: none)."""
    if hint < 0 or bins.of[hint] != b:
        return neighbours(bins, x, b)
    if hint < x:
        p, q = hint, bins.after[hint]
        while 0 <= q < x:
            p, q = q, bins.after[q]
    else:
        p, q = bins.before[hint], hint
        while p > x:
            p, q = bins.before[p], p
    return p, q


@numba.njit(cache=True)
def _exchange(
    bins: Any, n: int, above: Any, moved: Any, count: int, returned: Any, back: int, a: int, b: int,
    near_a: int, near_b: int,
) -> None:  # fmt: skip
    """Move ``count`` items from finest bin a to b, and ``back`` returned ones the other way, on all levels.

    ``near_a`` and ``near_b`` are items near the places where they go (−1: unknown).
    """
    for l in range(len(above)):
        of_a, of_b, shift = above[l, a], above[l, b], l * n
        if of_a == of_b:
            continue
        for i in range(count):
            remove_row(bins, moved[i] + shift)
        for i in range(back):
            remove_row(bins, returned[i] + shift)
        for i in range(back):
            y = returned[i] + shift
            p, q = _neighbours_near(bins, y, of_a, near_a + shift if near_a >= 0 else -1)
            link_row(bins, y, of_a, p, q)
        for i in range(count):
            x = moved[i] + shift
            p, q = _neighbours_near(bins, x, of_b, near_b + shift if near_b >= 0 else -1)
            link_row(bins, x, of_b, p, q)
