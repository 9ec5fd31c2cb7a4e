"""Where items go: first replicas and windows, all at once, then the slots of every window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts_core.plan.planners.anneal import anneal_partition
from harts_core.plan.planners.bins import bins_of_partition
from harts_core.plan.planners.greedy import MAX_SHARED, align_count, pack_greedily
from harts_core.plan.planners.two_level.depths import count_tokens, group_items, shared_depth
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
) -> Placement:
    """Place items so that replicas compute few tokens in all and equally many each.

    Args:
        length, lcp: int [L], items in lexicographic order, each length ≤ capacity.
        dp: D.
        windows: W, windows of about equal work; D·W ≤ L.
        capacity: T.
        moves: multiple of the usual number of annealing moves.
        seed: of the searches.

    Returns:
        The placement. A replica may leave slots empty, in windows where it has fewer items than slots.
    """
    cell = _match_windows(length, lcp, _anneal_cells(length, lcp, dp, windows, capacity, moves, seed), dp)
    slot = np.zeros(len(length), np.int64)
    window_of_slot: list[int] = []
    for w in range(windows):
        cells = [np.flatnonzero(cell == d * windows + w) for d in range(dp)]
        parts, slots = _pack_window(length, lcp, cells, capacity, moves, seed)
        for rows, part in zip(cells, parts, strict=True):
            slot[rows] = part + len(window_of_slot)
        window_of_slot.extend([w] * slots)
    return Placement(dp=dp, replica=cell // windows, slot=slot, window_of_slot=np.array(window_of_slot))


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


def _match_windows(length: Int64, lcp: Int32, cell: Int32, dp: int) -> Int64:
    """int64 [L], the cells with the windows of every replica in the order of their work.

    Which cells of the replicas form a window is free, and a step pays for the heaviest of each. Their work is
    what an outer producer does not hold: tokens that no other window of the replica uses.
    """
    windows = (int(cell.max()) + 1) // dp
    cells = group_items(lcp, cell, dp * windows)
    across = shared_depth(group_items(lcp, cell // windows, dp), cell % windows)
    work = (count_tokens(cells, length) - count_tokens(cells, across)).reshape(dp, windows)
    window = np.argsort(np.argsort(-work, axis=1, kind="stable"), axis=1)
    return cells.group // windows * windows + window.ravel()[cell]


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
) -> tuple[list[Int32], int]:
    """(slot of each item of each cell, number of slots), the fewest slots that are found to do for all.

    A cell with fewer items than that puts each into a slot of its own.
    """
    items = [(length[rows], neighbour_lcp(lcp, rows, np.arange(len(rows)) == 0)) for rows in cells]
    greedy = [
        pack_greedily(n, shared, order=np.arange(len(n)), rule=MAX_SHARED, capacity=capacity)
        for n, shared in items
    ]
    enough = max(int(part.max()) + 1 for part in greedy)
    tokens = [int((n - shared).sum()) for n, shared in items]
    fewest = max(-(-n // capacity) for n in tokens)
    best: list[Int32] = []
    for slots in range(enough, fewest - 1, -1):
        parts = []
        for (n, shared), part in zip(items, greedy, strict=True):
            bins = min(slots, len(n))
            start = align_count(n, shared, part, bins)
            found = anneal_partition(
                n,
                shared,
                start,
                num_bins=bins,
                capacity=capacity,
                moves=PACKING_MOVES * moves * len(n),
                seed=seed,
            )
            if bins_of_partition(n, shared, found, bins).load.max() > capacity:
                found = start  # within the capacity where it was not merged
            if bins_of_partition(n, shared, found, bins).load.max() > capacity:
                break
            parts.append(found)
        if len(parts) < len(cells):
            break
        best = parts
    return best, max(int(part.max()) + 1 for part in best)
