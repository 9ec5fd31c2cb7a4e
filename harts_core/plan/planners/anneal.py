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
    added_tokens,
    bins_of_partition,
    insert_row,
    neighbours,
    remove_row,
    shared_tokens,
)

OVERFLOW_PENALTY = 1000
"""Added per token above the capacity: a start may overflow, but no search gains by it."""
HOT_TOKENS, COLD_TOKENS = 8000, 100
"""Temperatures at the start and the end for bins of 65,536 tokens; they scale with the capacity."""
STAGES = 200
NEAR, SWAPS, GROUPS = 11, 6, 4
"""Of 16 moves, those towards a lexicographic neighbour's bin, and those that are swaps; of 16 rows that move,
those that take their closest relatives along."""
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
def next_random(state: Any) -> Any:
    """63 random bits, from xorshift64*."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(1))


@numba.njit(cache=True)
def below(bits: Any, n: int) -> Any:
    """A number in [0, n) from the lowest 32 bits."""
    return ((bits & 0xFFFFFFFF) * n) >> 32


@numba.njit(cache=True)
def _anneal(bins: Any, capacity: int, temperatures: Any, moves: int, state: Any, logarithms: Any) -> Any:
    """The partition with the least overflow, then the least tokens, of those at the stages' ends."""
    best, best_energy = bins.of.copy(), np.int64(2) ** 62
    moved, returned = np.empty(MAX_GROUP + 1, np.int64), np.empty(MAX_GROUP + 1, np.int64)
    for temperature in temperatures:
        for _ in range(moves):
            r, s = next_random(state), next_random(state)
            x = below(r, len(bins.of))
            a, b = bins.of[x], _target(bins, x, r >> 32, s)
            if a == b:
                continue
            count = gather_relatives(bins, x, (r >> 40) & 15, moved)
            back = 0
            if (r >> 44) & 15 < SWAPS:
                back = gather_relatives(
                    bins, member_of_bin(bins, b, (s >> 32) & 0xFFFF), (r >> 48) & 15, returned
                )
            if bins.size[a] - count + back == 0 or bins.size[b] - back + count == 0:
                continue  # would empty a bin
            before = _penalised(bins.load[a], capacity) + _penalised(bins.load[b], capacity)
            alone = count == 1 and back <= 1
            if alone:
                load_a, load_b = _loads_after(bins, x, returned[0] if back else -1, a, b)
            else:
                _exchange(bins, moved, count, returned, back, a, b)
                load_a, load_b = bins.load[a], bins.load[b]
            change = _penalised(load_a, capacity) + _penalised(load_b, capacity) - before
            accepted = change * UNIT <= temperature * logarithms[(s >> 48) & 1023]
            if accepted and alone:
                _exchange(bins, moved, count, returned, back, a, b)
            elif not accepted and not alone:
                _exchange(bins, moved, count, returned, back, b, a)
        energy = np.int64(0)
        for load in bins.load:
            energy += _penalised(load, capacity)
        if energy < best_energy:
            best_energy = energy
            best[:] = bins.of
    return best


@numba.njit(cache=True)
def _penalised(load: Any, capacity: int) -> Any:
    """The tokens of a bin, and the penalty of those above the capacity."""
    return load + OVERFLOW_PENALTY * max(0, load - capacity)


@numba.njit(cache=True)
def _loads_after(bins: Any, x: int, y: int, a: int, b: int) -> Any:
    """Loads of bins a and b after x moves from a to b, and y (−1: none) the other way."""
    load_a = bins.load[a] - added_tokens(bins, x, bins.before[x], bins.after[x])
    load_b = bins.load[b]
    p, q = neighbours(bins, x, b)
    if y >= 0:
        load_b -= added_tokens(bins, y, bins.before[y], bins.after[y])
        p, q = neighbours_without(bins, y, p, q)
        s, t = neighbours(bins, y, a)
        s, t = neighbours_without(bins, x, s, t)
        load_a += added_tokens(bins, y, s, t)
    return load_a, load_b + added_tokens(bins, x, p, q)


@numba.njit(cache=True)
def neighbours_without(bins: Any, x: int, p: int, q: int) -> Any:
    """Neighbours p, q of some row, as they are when x has left their bin."""
    return (bins.before[x] if p == x else p), (bins.after[x] if q == x else q)


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
def _target(bins: Any, x: int, near: Any, far: Any) -> Any:
    """A bin to move x to: mostly one of its lexicographic neighbours', where there is something to share."""
    if near & 15 < NEAR:
        distance = 1 + (near >> 4) % 8
        y = x + distance if far & 1 else x - distance
        if 0 <= y < len(bins.of):
            return bins.of[y]
    return below(far, len(bins.head))


@numba.njit(cache=True)
def member_of_bin(bins: Any, b: int, bits: Any) -> Any:
    """A random row of bin b."""
    y = bins.head[b]
    for _ in range(bits % bins.size[b]):
        y = bins.after[y]
    return y


@numba.njit(cache=True)
def gather_relatives(bins: Any, x: int, kind: int, moved: Any) -> int:
    """Write rows of one bin to ``moved`` and return their number: x alone, or (``kind`` < GROUPS) x with all
    that share as much with it as its neighbour on one side does."""
    moved[0] = x
    count = 1
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
