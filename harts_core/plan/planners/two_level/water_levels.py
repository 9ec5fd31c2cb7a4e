"""How far to lower each slot's residual, and which producer takes what is hoisted.

A residual token that only one consumer uses may as well be computed by a producer: no token is computed
twice. Lowering slot j of window w to the level R[w, j] hoists, on every replica d, what exceeds it into the
window's inner producer or the step-long outer one. A step pays Σ R[w, j] + Σ_w max_d inner + max_d outer.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
STEPS = 512
"""A level falls by at most this fraction of the room at a time, so that the prices keep up."""
TRIED_SPLITS = 64


def lower_levels(
    residual: Int64, fixed: Int64, inner: Int64, outer: Int64, inner_room: int, outer_room: int
) -> Int64:
    """int64 [W, J], the level of every slot.

    Levels are lowered as long as there is room, and the best state on the way is returned. Each window in
    turn lowers the slot whose heaviest consumers sit on the replicas with the most room: room ρ has the
    price 1/(ρ + 1), a slot the prices of the replicas at its level.

    Args:
        residual: int64 [D, W, J], blocks of ``pad`` tokens of each consumer; 0 where a window has no slot.
        fixed: int64 [D, W, J], the part of them that cannot be hoisted.
        inner, outer: int64 [D, W] and [D], blocks held by the producers before hoisting, within their rooms.
        inner_room, outer_room: blocks that the inner producers of a window, and the outer one, may hold.
    """
    step = max(1, (inner_room + outer_room) // STEPS)
    level: Int64 = _lower_levels(residual, fixed, inner.copy(), outer.copy(), inner_room, outer_room, step)
    return level


@numba.njit(cache=True)
def _lower_levels(
    residual: Any, fixed: Any, inner: Any, outer: Any, inner_room: int, outer_room: int, step: int
) -> Any:
    dp, windows, slots = residual.shape
    level = np.zeros((windows, slots), np.int64)
    least = np.int64(0)  # no plan pays less than the heaviest replica's total
    for d in range(dp):
        least = max(least, outer[d] + inner[d].sum() + residual[d].sum())
        level = np.maximum(level, residual[d])
    best, best_paid = level.copy(), np.int64(-1)
    lowered = True
    while lowered:
        paid = level.sum() + outer.max()
        for w in range(windows):
            paid += inner[:, w].max()
        if best_paid < 0 or paid < best_paid:
            best[:], best_paid = level, paid
        if paid <= least:
            break
        lowered = False
        for w in range(windows):
            j, drop = _cheapest(
                residual[:, w], fixed[:, w], level[w], inner[:, w], outer, inner_room, outer_room, windows
            )
            if j < 0:
                continue
            drop = min(drop, step)
            lowered = True
            for d in range(dp):
                if residual[d, w, j] >= level[w, j]:
                    if inner_room - inner[d, w] >= (outer_room - outer[d]) // windows:
                        inner[d, w] += drop
                    else:
                        outer[d] += drop
            level[w, j] -= drop
    return best


@numba.njit(cache=True)
def _cheapest(
    residual: Any,
    fixed: Any,
    level: Any,
    inner: Any,
    outer: Any,
    inner_room: int,
    outer_room: int,
    windows: int,
) -> Any:
    """(slot of one window to lower, how far at most); (−1, 0): none can be, or none would gain."""
    dp, slots = residual.shape
    best, best_price, best_drop = -1, np.inf, np.int64(0)
    for j in range(slots):
        price, drop, on_top = 0.0, level[j], 0
        for d in range(dp):
            if residual[d, j] >= level[j]:
                room, share = inner_room - inner[d], (outer_room - outer[d]) // windows
                price += 1.0 / (max(room, share) + 1)
                drop = min(drop, level[j] - fixed[d, j])
                drop = min(drop, room if room >= share else outer_room - outer[d])
                on_top += 1
            else:
                drop = min(drop, level[j] - residual[d, j])
        if drop > 0 and on_top < dp and price < best_price:
            best, best_price, best_drop = j, price, drop
    return best, best_drop


def split_producers(held: Int64, outer: Int64, inner_room: int, outer_room: int) -> Int64:
    """int64 [D, W], blocks that move from each inner producer to the outer one.

    Minimises Σ_w max_d inner + max_d outer, by trying sizes of the outer producer.

    Args:
        held: int64 [D, W], blocks beyond the outer producer's, hoisted ones included.
        outer: int64 [D], blocks of the outer producer.
        inner_room, outer_room: as above. They must suffice: outer + Σ max(0, held − inner_room)
            ≤ outer_room on every replica.
    """
    excess: Int64 = outer + np.maximum(0, held - inner_room).sum(axis=1)
    low = int(excess.max())
    best, best_paid = np.maximum(0, held - inner_room), -1
    for size in sorted({low + (outer_room - low) * i // TRIED_SPLITS for i in range(TRIED_SPLITS + 1)}):
        if size < low:
            continue
        moved = _fill_outer(held, outer, inner_room, size)
        paid = int((held - moved).max(axis=0).sum() + (outer + moved.sum(axis=1)).max())
        if best_paid < 0 or paid < best_paid:
            best, best_paid = moved, paid
    return best


@numba.njit(cache=True)
def _fill_outer(held: Any, outer: Any, inner_room: int, size: int) -> Any:
    """Blocks moved to an outer producer of ``size`` while they lower a window's largest inner one."""
    dp, windows = held.shape
    moved = np.maximum(0, held - inner_room)
    room = size - outer - moved.sum(axis=1)
    while True:
        best, best_top, best_drop = -1, dp + 1, np.int64(0)
        for w in range(windows):
            level = (held[:, w] - moved[:, w]).max()
            drop, top = level, 0
            for d in range(dp):
                here = held[d, w] - moved[d, w]
                if here == level:
                    drop = min(drop, room[d])
                    top += 1
                else:
                    drop = min(drop, level - here)
            if drop > 0 and (top < best_top or (top == best_top and drop > best_drop)):
                best, best_top, best_drop = w, top, drop
        if best < 0:
            return moved
        level = (held[:, best] - moved[:, best]).max()
        for d in range(dp):
            if held[d, best] - moved[d, best] == level:
                moved[d, best] += best_drop
                room[d] -= best_drop
