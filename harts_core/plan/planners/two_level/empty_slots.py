"""Rows for the slots that a placement of leaves leaves empty."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from harts_core.plan.planners.harts_l1 import Items
from harts_core.plan.planners.problem import PlanProblem
from harts_core.plan.planners.two_level.placement import Placement
from harts_core.trees.neighbours import neighbour_lcp


def fill_empty_slots(
    problem: PlanProblem, items: Items, placement: Placement
) -> tuple[Items, Placement] | None:
    """Give every empty consumer a row of its own that is a prefix of an item of its replica and window.

    Such a row is free where it was; alone, all its tokens are shared with that item, so that a producer can
    hold them. The shortest rows are taken.

    Args:
        problem: whose rows they are.
        items: what was placed.
        placement: where; some consumers may be empty.

    Returns:
        The items, those rows among them, and their placement; None where a replica and window has too few.
    """
    windows, num_slots = placement.num_windows, len(placement.window_of_slot)
    empty = np.ones((problem.dp, num_slots), np.bool_)
    empty[placement.replica, placement.slot] = False
    if not empty.any():
        return items, placement
    last = items.last_row()
    spare = np.ones(len(problem.rows), np.bool_)
    spare[last] = False
    rows = np.flatnonzero(spare)
    slot, replica = placement.slot[items.of_row], placement.replica[items.of_row]
    cell = replica[rows] * windows + placement.window_of_slot[slot[rows]]
    order = np.lexsort((problem.length[rows], cell))
    rows, cell = rows[order], cell[order]
    empty_replica, empty_slot = np.nonzero(empty)  # their cells ascend
    wanted = empty_replica * windows + placement.window_of_slot[empty_slot]
    index = np.searchsorted(cell, wanted) + np.arange(len(wanted)) - np.searchsorted(wanted, wanted)
    if (index >= np.searchsorted(cell, wanted, side="right")).any():
        return None
    alone = rows[index]
    slot[alone] = empty_slot
    of_row = last[items.of_row]
    of_row[alone] = alone
    placed = np.union1d(last, alone)
    more = Items(
        length=problem.length[placed],
        lcp=neighbour_lcp(problem.lcp, placed.astype(np.int32), np.arange(len(placed)) == 0),
        of_row=np.searchsorted(placed, of_row),
    )
    return more, replace(placement, replica=replica[placed], slot=slot[placed])
