"""Where a stage runs its backwards among its forwards.

Both come in the order of the single process; that leaves for each backward its place among the forwards: the
number of forwards that run before it on the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts_core.plan.schedule.units import Event

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitOrder:
    """The single-process order of some units, as two lists and the backwards' place among the forwards.

    Attributes:
        forward: units in forward order.
        backward: units in backward order.
        earliest: int64 [backwards], forwards that must have run before each backward; never falls.
        producer: bool [units of the plan].
    """

    forward: list[int]
    backward: list[int]
    earliest: Int64
    producer: npt.NDArray[np.bool_]


def unit_order(single: Sequence[Event], *, producer: npt.NDArray[np.bool_]) -> UnitOrder:
    """The order of a single process's events.

    Args:
        single: forwards, backwards and frees of a training pass.
        producer: bool [units of the plan].
    """
    forward: list[int] = []
    backward: list[int] = []
    earliest: list[int] = []
    for event in single:
        if event.kind == "forward":
            forward.append(event.unit)
        elif event.kind == "backward":
            backward.append(event.unit)
            earliest.append(len(forward))
    return UnitOrder(
        forward=forward, backward=backward, earliest=np.array(earliest, np.int64), producer=producer
    )


def window_deadlines(order: UnitOrder, window: npt.NDArray[np.int32]) -> Int64:
    """Deadlines that keep windows apart: all that can run backward does before the next window starts.

    Args:
        order: of the units.
        window: int32 [units of the plan], a consumer's innermost window.

    Returns:
        int64 [backwards], the place in the forward order before which each backward has to come.
    """
    deadlines = np.full(len(order.backward), len(order.forward), np.int64)
    consumers = np.flatnonzero(~order.producer[order.forward])
    windows = window[np.array(order.forward)[consumers]]
    for j in np.flatnonzero(windows[1:] != windows[:-1]):
        place = consumers[j] + 1  # of the first unit after the window, its consumer or its producer
        done = np.searchsorted(order.earliest, place, side="right")
        deadlines[:done] = np.minimum(deadlines[:done], place)
    return deadlines


def producer_deadlines(order: UnitOrder, limit: int) -> Int64:
    """Deadlines that keep no more than ``limit`` producers alive, in the form of :func:`window_deadlines`."""
    deadlines = np.full(len(order.backward), len(order.forward), np.int64)
    ends = np.flatnonzero(order.producer[order.backward])
    starts = np.flatnonzero(order.producer[order.forward])
    for i in range(limit, len(starts)):  # the (i + 1)th producer: i + 1 − limit before it have to be gone
        done = ends[i - limit] + 1
        deadlines[:done] = np.minimum(deadlines[:done], starts[i])
    return deadlines


def latest_places(order: UnitOrder, lag: int, deadlines: Int64) -> Int64:
    """Places on a stage that keeps up to ``lag`` + 1 consumers in flight.

    Args:
        order: of the units.
        lag: consumer forwards by which a backward comes later than it could.
        deadlines: int64 [backwards], none before ``order.earliest``.

    Returns:
        int64 [backwards], how many forwards come before each.
    """
    if not lag:
        return order.earliest
    consumer_ends = np.flatnonzero(~order.producer[order.forward]) + 1
    ends = np.append(consumer_ends, np.full(lag, len(order.forward)))
    done = np.searchsorted(consumer_ends, order.earliest, side="right")
    places: Int64 = np.minimum(ends[done + lag - 1], deadlines)
    return places


def merge(order: UnitOrder, places: Int64) -> list[Event]:
    """One stage's forwards and backwards; a unit is freed right after its backward.

    Args:
        order: of the units.
        places: int64 [backwards], how many forwards come before each; never falls.
    """
    events: list[Event] = []
    bounds = np.searchsorted(places, np.arange(len(order.forward) + 1), side="right").tolist()
    done = 0
    for i, unit in enumerate([*order.forward, None]):
        for ended in order.backward[done : bounds[i]]:
            events.append(Event(kind="backward", unit=ended))
            events.append(Event(kind="free", unit=ended))
        done = bounds[i]
        if unit is not None:
            events.append(Event(kind="forward", unit=unit))
    return events
