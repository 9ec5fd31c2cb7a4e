"""The order of units on one process: forwards, backwards, and when what a unit keeps is freed.

Units run forward in the plan's order. A unit from which nobody imports runs backward at once; an owner runs
backward once, when the last unit that imports from it has. That rule alone covers windows (producers), nested
windows, and chains of consumers, whose backwards run in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import PlanBundle

EventKind = Literal[
    "forward",
    "recompute",
    "backward",
    "free",
    "receive_activation",
    "send_activation",
    "receive_gradient",
    "send_gradient",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step of the execution.

    Attributes:
        kind: ``forward`` or ``backward`` of the unit, or ``free``: its graph, its interface and the gradients
            gathered in it are dropped. ``recompute``: its second forward
            (``harts_core.plan.schedule.second_forwards``). In a pipeline also the transfers: activations come
            from the stage before and go to the stage after, gradients the other way.
        unit: unit id.
    """

    kind: EventKind
    unit: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitLinks:
    """Who reads tokens of whom.

    Attributes:
        owners: for each unit the units that it imports from, the latest in forward order first.
        importers: for each unit the units that import from it, in forward order.
    """

    owners: tuple[tuple[int, ...], ...]
    importers: tuple[tuple[int, ...], ...]


def unit_links(bundle: PlanBundle) -> UnitLinks:
    """The imports of a plan, unit by unit."""
    order = bundle.units.order
    owners: list[list[int]] = [[] for _ in range(bundle.num_units)]
    importers: list[list[int]] = [[] for _ in range(bundle.num_units)]
    pairs = np.stack([bundle.spans.unit, bundle.spans.owner], axis=1)
    for unit, owner in np.unique(pairs, axis=0).tolist():
        if owner != unit:
            owners[unit].append(owner)
            importers[owner].append(unit)
    return UnitLinks(
        owners=tuple(tuple(sorted(found, key=lambda u: -order[u])) for found in owners),
        importers=tuple(tuple(sorted(found, key=lambda u: order[u])) for found in importers),
    )


def unit_events(links: UnitLinks, units: Sequence[int], *, training: bool = True) -> tuple[Event, ...]:
    """The events of some units.

    Args:
        links: of the plan.
        units: unit ids in forward order, replica after replica; with a unit all that it imports from and all
            that import from it.
        training: False: forward only; a unit is freed when the last unit that imports from it has run.

    Returns:
        Every unit's forward, backward (training) and free, once each.
    """
    waiting = {unit: len(links.importers[unit]) for unit in units}
    events: list[Event] = []

    def finish(unit: int) -> Iterator[Event]:
        """Everything that can run once nobody will read the unit any more."""
        if training:
            yield Event(kind="backward", unit=unit)
        yield Event(kind="free", unit=unit)
        if training:
            yield from release(unit)

    def release(unit: int) -> Iterator[Event]:
        """The unit has read its owners for the last time."""
        for owner in links.owners[unit]:
            waiting[owner] -= 1
            if not waiting[owner]:
                yield from finish(owner)

    for unit in units:
        events.append(Event(kind="forward", unit=unit))
        if not training:
            events.extend(release(unit))
        if not waiting[unit]:
            events.extend(finish(unit))
    return tuple(events)


def peak_alive(events: Sequence[Event], weight: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> int:
    """The largest total weight of the units alive at once, between their forward and their free.

    Args:
        events: of one process or one pipeline stage.
        weight: [units of the plan], a unit's weight; True counts units.
    """
    alive = peak = 0
    for event in events:
        alive += int(weight[event.unit]) * ((event.kind == "forward") - (event.kind == "free"))
        peak = max(peak, alive)
    return peak
