"""When each unit's forward and backward run and when what it keeps is freed: pure functions of the plan.

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

from harts_core.errors import ConfigError
from harts_core.plan.bundle import CONSUMER, PlanBundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step of the execution.

    Attributes:
        kind: ``forward`` or ``backward`` of the unit, or ``free``: its graph, its interface and the gradients
            gathered in it are dropped.
        unit: unit id.
    """

    kind: Literal["forward", "backward", "free"]
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


def minibatch_units(bundle: PlanBundle, links: UnitLinks, num_minibatches: int) -> list[tuple[int, ...]]:
    """Split a plan's slots, in order, into runs that become one optimizer step each.

    A run boundary must not separate a unit from one that it imports from: after the update the owner's
    interface would be that of other weights. Among the boundaries that do not, those nearest to an even
    split are taken.

    Returns:
        For each minibatch its units, replica after replica, in forward order.

    Raises:
        ConfigError: sharing leaves fewer than ``num_minibatches`` runs.
    """
    slot = first_slots(bundle, links)
    num_slots = int(slot.max()) + 1
    crossed = np.zeros(num_slots + 1, np.int64)
    for unit, owners in enumerate(links.owners):
        for owner in owners:  # boundaries in (slot of the owner, slot of the importer]
            crossed[slot[owner] + 1] += 1
            crossed[slot[unit] + 1] -= 1
    allowed = np.flatnonzero(np.cumsum(crossed[:num_slots])[1:] == 0) + 1
    if len(allowed) + 1 < num_minibatches:
        raise ConfigError(
            f"[optimizer] num_minibatches = {num_minibatches}, but the plan falls into at most "
            f"{len(allowed) + 1}: its {num_slots} slots share prefixes across the other bounds, and an "
            "update between them would mix old and new weights",
            hint="plan without sharing across microbatches (--planner harts-l1), or lower num_minibatches",
        )
    cuts = [0, *_nearest_cuts(allowed.tolist(), num_slots, num_minibatches), num_slots]
    order = np.lexsort((bundle.units.order, bundle.units.replica))
    part = np.searchsorted(cuts, slot[order], side="right") - 1
    return [tuple(order[part == m].tolist()) for m in range(num_minibatches)]


def first_slots(bundle: PlanBundle, links: UnitLinks) -> npt.NDArray[np.int64]:
    """int64 [units], a consumer's slot; for a producer the first slot of the units that import from it."""
    slot = bundle.units.slot.astype(np.int64)
    latest_first = np.argsort(-bundle.units.order, kind="stable")
    for unit in latest_first.tolist():
        if bundle.units.kind[unit] != CONSUMER:
            slot[unit] = min((slot[reader] for reader in links.importers[unit]), default=0)
    return slot


def _nearest_cuts(allowed: list[int], num_slots: int, parts: int) -> list[int]:
    """One allowed bound for each even bound, strictly increasing, leaving enough for those to come."""
    cuts: list[int] = []
    first = 0
    for m in range(1, parts):
        choices = range(first, len(allowed) - (parts - 1 - m))
        best = min(choices, key=lambda i: abs(allowed[i] * parts - m * num_slots))
        cuts.append(allowed[best])
        first = best + 1
    return cuts
