"""Packing things of fixed weight into consumers: nothing is shared between two of them.

First-fit decreasing gives the number of consumers, rounded up to a multiple of D. The things are then spread
over that many: heaviest first, each to the lightest consumer; where that overflows the capacity, the
first-fit packing stays and its heaviest consumers are halved instead.
"""

from __future__ import annotations

import heapq
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.plan.planners.problem import Int32, Int64
from harts_core.plan.planners.rooms import empty_rooms, first_with_room, set_room


def first_fit_decreasing(weight: Int64, capacity: int) -> Int32:
    """int32 [M], the consumer of each thing: heaviest first, each to the first consumer with room.

    Args:
        weight: int64 [M], 1 ≤ weight ≤ capacity.
        capacity: T.
    """
    order = np.argsort(-weight, kind="stable")
    consumer: Int32 = _first_fit(weight, order, capacity, empty_rooms(len(weight)))
    return consumer


def pack_evenly(weight: Int64, fitted: Int32, *, capacity: int, count: int) -> Int32:
    """int32 [M], the things packed into ``count`` consumers, none empty, all within the capacity.

    Args:
        weight: int64 [M], as above.
        fitted: int32 [M], their first-fit packing, into at most ``count`` consumers.
        capacity: T.
        count: ≤ M.
    """
    spread = spread_heaviest_first(weight, count)
    load = np.zeros(count, np.int64)
    np.add.at(load, spread, weight)
    return spread if load.max() <= capacity else _halve_heaviest(weight, fitted, count)


def spread_heaviest_first(weight: npt.NDArray[Any], count: int) -> Int32:
    """int32 [M]: heaviest first, each to the lightest of ``count`` (ties: the lowest); none stays empty if
    count ≤ M and all weights are positive."""
    part = np.empty(len(weight), np.int32)
    heap = [(0, b) for b in range(count)]
    for x in np.argsort(-weight, kind="stable").tolist():
        load, b = heap[0]
        part[x] = b
        heapq.heapreplace(heap, (load + weight[x].item(), b))
    return part


@numba.njit(cache=True)
def _first_fit(weight: Any, order: Any, capacity: int, rooms: Any) -> Any:
    consumer = np.empty(len(weight), np.int32)
    left = np.empty(len(weight), np.int64)
    count = 0
    for x in order:
        b = first_with_room(rooms, weight[x])
        if b < 0:
            b = count
            left[b] = capacity
            count += 1
        left[b] -= weight[x]
        set_room(rooms, b, left[b])
        consumer[x] = b
    return consumer


def _halve_heaviest(weight: Int64, fitted: Int32, count: int) -> Int32:
    """Split the heaviest consumer that has two things, dealt out in turn, until there are enough."""
    members = [np.flatnonzero(fitted == b) for b in range(int(fitted.max()) + 1)]
    while len(members) < count:
        load = [int(weight[m].sum()) if len(m) > 1 else 0 for m in members]
        heaviest = int(np.argmax(load))
        things = members[heaviest][np.argsort(-weight[members[heaviest]], kind="stable")]
        members[heaviest] = things[::2]
        members.append(things[1::2])
    consumer = np.empty(len(weight), np.int32)
    for b, things in enumerate(members):
        consumer[things] = b
    return consumer
