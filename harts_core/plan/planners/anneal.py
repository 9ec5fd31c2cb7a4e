"""Annealing a partition into K bins: rows relocate, swap, or move with the relatives they share most with.

Only integers decide (a seeded xorshift generator, a table of −ln u, temperatures that fall by a fixed
fraction), so that the result is the same on any machine.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.plan.planners.bins import (
    bins_of_partition,
    insert_row,
    remove_row,
    shared_tokens,
)

OVERFLOW_PENALTY = 1000
"""Added per token above the capacity: a start may overflow, but no search gains by it."""
HOT_TOKENS, COLD_TOKENS = 8000, 100
"""Temperatures at the start and the end for bins of 65,536 tokens; they scale with the capacity."""
STAGES = 200
SWAPS, GROUPS = 6, 4
"""Of 16 moves, those that are swaps; of 16 rows that move, those that take their closest relatives along."""
MAX_GROUP = 64
UNIT = 1 << 12
LOGARITHMS = np.round(-np.log((np.arange(1024) + 0.5) / 1024) * UNIT).astype(np.int64)


def anneal_partition(
    length: npt.NDArray[Any],
    lcp: npt.NDArray[Any],
    partition: npt.NDArray[np.int32],
    *,
    num_bins: int,
    capacity: int,
    moves: int,
    seed: int,
) -> npt.NDArray[np.int32]:
    """Search for a partition with fewer compact tokens; no bin is ever emptied.

    Args:
        length, lcp: int [N], rows in lexicographic order.
        partition: int32 [N], the start; bins may exceed the capacity, but none is empty.
        num_bins: K.
        capacity: T.
        moves: how many moves are tried.
        seed: of the search.

    Returns:
        int32 [N], the partition with the least overflow, then the fewest tokens, that the search met.
    """
    bins = bins_of_partition(length, lcp, partition, num_bins)
    hot = max(1, HOT_TOKENS * capacity // 65536)
    cold = max(1, COLD_TOKENS * capacity // 65536)
    # Rounded, so that no machine's last bit decides.
    temperatures = np.round(np.geomspace(hot, cold, STAGES)).astype(np.int64)
    generator = np.array([seed * 2 + 1], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    best: npt.NDArray[np.int32] = _anneal(
        bins, capacity, temperatures, max(1, moves // STAGES), generator, LOGARITHMS
    )
    return best


@numba.njit(cache=True)
def _next(state: Any) -> Any:
    """A random number in [0, 2^31) from xorshift64*."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(33))


@numba.njit(cache=True)
def _overflow(bins: Any, a: int, b: int, capacity: int) -> int:
    """Tokens of two bins above the capacity."""
    return max(0, bins.load[a] - capacity) + max(0, bins.load[b] - capacity)


@numba.njit(cache=True)
def _anneal(bins: Any, capacity: int, temperatures: Any, moves: int, state: Any, logarithms: Any) -> Any:
    """The partition with the least overflow, then the least tokens, that the search passes through."""
    tokens, overflow = np.int64(0), np.int64(0)
    for b in range(len(bins.load)):
        tokens += bins.load[b]
        overflow += max(0, bins.load[b] - capacity)
    best, best_tokens, best_overflow = bins.of.copy(), tokens, overflow
    moved, returned = np.empty(MAX_GROUP + 1, np.int64), np.empty(MAX_GROUP + 1, np.int64)
    for temperature in temperatures:
        for _ in range(moves):
            x = _next(state) % len(bins.of)
            a = bins.of[x]
            b = _target(bins, x, state)
            if a == b:
                continue
            load, over = bins.load[a] + bins.load[b], _overflow(bins, a, b, capacity)
            count = _gather(bins, x, state, moved)
            back = 0
            if _next(state) % 16 < SWAPS:
                back = _gather(bins, _member(bins, b, state), state, returned)
            if bins.size[a] - count + back == 0 or bins.size[b] - back + count == 0:
                continue  # would empty a bin
            if over == 0 and count == 1 and back <= 1:
                y = returned[0] if back else -1
                if _overfills(bins, b, x, y, capacity) or _overfills(bins, a, y, x, capacity):
                    continue
            _exchange(bins, moved, count, returned, back, a, b)
            more = bins.load[a] + bins.load[b] - load
            more_over = _overflow(bins, a, b, capacity) - over
            change = more + OVERFLOW_PENALTY * more_over
            if change * UNIT > temperature * logarithms[_next(state) % len(logarithms)]:
                _exchange(bins, moved, count, returned, back, b, a)
                continue
            tokens += more
            overflow += more_over
            if overflow < best_overflow or (overflow == best_overflow and tokens < best_tokens):
                best_tokens, best_overflow = tokens, overflow
                best[:] = bins.of
    return best


@numba.njit(cache=True)
def _overfills(bins: Any, b: int, x: int, y: int, capacity: int) -> bool:
    """Whether bin b surely exceeds the capacity with x in and y out (−1: none): most moves fail here.

    In any bin x shares at most what it shares with a lexicographic neighbour, and y gives back at most all.
    """
    if x < 0:
        return False
    shared = bins.minima[0, x] if x > 0 else 0
    if x + 1 < len(bins.of):
        shared = max(shared, bins.minima[0, x + 1])
    freed = bins.length[y] if y >= 0 else 0
    return bool(bins.load[b] + bins.length[x] - shared - freed > capacity)


@numba.njit(cache=True)
def _exchange(bins: Any, moved: Any, count: int, returned: Any, back: int, a: int, b: int) -> None:
    """Move ``count`` rows from bin a to bin b, and ``back`` returned ones the other way."""
    for i in range(count):
        remove_row(bins, moved[i])
    for i in range(back):
        remove_row(bins, returned[i])
    for i in range(back):
        insert_row(bins, returned[i], a)
    for i in range(count):
        insert_row(bins, moved[i], b)


@numba.njit(cache=True)
def _target(bins: Any, x: int, state: Any) -> int:
    """A bin to move x to: mostly one of its lexicographic neighbours', where there is something to share."""
    n = len(bins.of)
    r = _next(state)
    if r % 10 < 7:
        distance = 1 + (r // 16) % 8
        y = x + distance if (r // 128) % 2 else x - distance
        if 0 <= y < n:
            return int(bins.of[y])
    return int(_next(state) % len(bins.head))


@numba.njit(cache=True)
def _member(bins: Any, b: int, state: Any) -> int:
    """A random row of bin b."""
    y = bins.head[b]
    for _ in range(_next(state) % bins.size[b]):
        y = bins.after[y]
    return int(y)


@numba.njit(cache=True)
def _gather(bins: Any, x: int, state: Any, moved: Any) -> int:
    """Write rows of one bin to ``moved`` and return their number: x alone, or x with all that share as much
    with it as its neighbour there does."""
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
