"""Where items go: first replicas and windows, all at once, then the slots of every window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts_core.plan.planners.anneal import anneal_partition
from harts_core.plan.planners.bins import bins_of_partition
from harts_core.plan.planners.greedy import MAX_SHARED, align_count, pack_greedily
from harts_core.plan.planners.two_level.nested_bins import WEIGHT, BinLevel, anneal_nested
from harts_core.trees.neighbours import neighbour_lcp

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

REPLICA_STIFFNESS = 200
"""What unequal replicas cost, up to 8 of them; with more, which have fewer items each, evening them out costs
more tokens than it is worth."""
CELL_STIFFNESS, CELL_WEIGHT = 10, 4
"""What unequal cells cost, and their tokens: those shared by windows of a replica are computed once, but fill
its outer producer."""
HOT_TOKENS, COLD_TOKENS = 2000, 20
"""Temperatures at the start and the end, for a capacity of 65,536 tokens."""
CELL_MOVES, PACKING_MOVES = 400, 200
"""Annealing moves per item (for cells, from 32 replicas on a multiple)."""
MOST_MOVES = 6_000_000
"""In one annealing; reached at about 15,000 items."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """A replica and a slot for every item, and windows over the slots.

    Attributes:
        dp: D.
        replica, slot: int64 [L].
        window_of_slot: int64 [J], 0, 1, … in runs.
    """

    dp: int
    replica: Int64
    slot: Int64
    window_of_slot: Int64

    @property
    def num_windows(self) -> int:
        """W."""
        return int(self.window_of_slot[-1]) + 1


def place_items(
    length: Int64, lcp: Int32, *, dp: int, windows: int, capacity: int, moves: int, seed: int
) -> Placement | None:
    """Place items so that replicas compute few tokens in all and equally many each.

    Args:
        length, lcp: int [L], items in lexicographic order, each length ≤ capacity.
        dp: D.
        windows: W, windows of about equal work; D·W ≤ L.
        capacity: T.
        moves: multiple of the usual number of annealing moves.
        seed: of the searches.

    Returns:
        None where some cell (replica and window) has too few items for its window's slots.
    """
    cell = _anneal_cells(length, lcp, dp, windows, capacity, moves, seed)
    slot = np.zeros(len(length), np.int64)
    window_of_slot: list[int] = []
    for w in range(windows):
        cells = [np.flatnonzero(cell == d * windows + w) for d in range(dp)]
        packed = _pack_window(length, lcp, cells, capacity, moves, seed)
        if packed is None:
            return None
        parts, slots = packed
        for rows, part in zip(cells, parts, strict=True):
            slot[rows] = part + len(window_of_slot)
        window_of_slot.extend([w] * slots)
    return Placement(
        dp=dp, replica=cell.astype(np.int64) // windows, slot=slot, window_of_slot=np.array(window_of_slot)
    )


def _anneal_cells(
    length: Int64, lcp: Int32, dp: int, windows: int, capacity: int, moves: int, seed: int
) -> Int32:
    """The cell d·W + w of every item, from equal contiguous runs."""
    cells = np.arange(dp * windows)
    tokens = int((length - lcp).sum())
    # One item for every slot that the window may come to have.
    least = min(-(-3 * tokens // (2 * capacity * len(cells))) + 1, len(length) // len(cells))
    levels = [
        BinLevel(
            of_finest=cells // windows,
            target=np.full(dp, max(1, tokens // dp)),
            weight=WEIGHT,
            stiffness=max(1, round(REPLICA_STIFFNESS * (8 / max(8, dp)) ** 2.5)),
        )
    ]
    if windows > 1:
        target = np.full(len(cells), max(1, tokens // len(cells)))
        levels.append(BinLevel(of_finest=cells, target=target, weight=CELL_WEIGHT, stiffness=CELL_STIFFNESS))
    return anneal_nested(
        length,
        lcp,
        equal_runs(length, lcp, len(cells)),
        levels,
        least_items=np.full(len(cells), least),
        hot=HOT_TOKENS * capacity // 65536,
        cold=COLD_TOKENS * capacity // 65536,
        moves=min(MOST_MOVES, CELL_MOVES * moves * max(1, dp // 16) * len(length)),
        seed=seed,
    )


def equal_runs(length: Int64, lcp: Int32, count: int) -> Int32:
    """int32 [L], contiguous runs of about equally many new tokens, none empty; count ≤ L."""
    new = np.cumsum(length - lcp)
    runs = (new - 1) * count // new[-1]
    index = np.arange(count)
    bounds = np.searchsorted(runs, index)  # the first item of every run, before none may be empty
    bounds = np.maximum.accumulate(bounds - index) + index
    bounds = np.minimum(bounds, len(length) - count + index)
    starts = np.zeros(len(length), np.int32)
    starts[bounds[1:]] = 1
    return np.cumsum(starts, dtype=np.int32)


def _pack_window(
    length: Int64, lcp: Int32, cells: list[Int64], capacity: int, moves: int, seed: int
) -> tuple[list[Int32], int] | None:
    """(slot of each item of each cell, number of slots), the fewest slots that are found to do for all."""
    items = [(length[rows], neighbour_lcp(lcp, rows, np.arange(len(rows)) == 0)) for rows in cells]
    greedy = [
        pack_greedily(n, shared, order=np.arange(len(n)), rule=MAX_SHARED, capacity=capacity)
        for n, shared in items
    ]
    enough = max(int(part.max()) + 1 for part in greedy)
    if enough > min(len(rows) for rows in cells):
        return None
    tokens = [int((n - shared).sum()) for n, shared in items]
    fewest = max(-(-n // capacity) for n in tokens)
    best: list[Int32] = []
    for slots in range(enough, fewest - 1, -1):
        parts = []
        for (n, shared), part in zip(items, greedy, strict=True):
            start = align_count(n, shared, part, slots)
            found = anneal_partition(
                n,
                shared,
                start,
                num_bins=slots,
                capacity=capacity,
                moves=PACKING_MOVES * moves * len(n),
                seed=seed,
            )
            if bins_of_partition(n, shared, found, slots).load.max() > capacity:
                found = start  # within the capacity where it was not merged
            if bins_of_partition(n, shared, found, slots).load.max() > capacity:
                break
            parts.append(found)
        if len(parts) < len(cells):
            break
        best = parts
    return best, max(int(part.max()) + 1 for part in best)
