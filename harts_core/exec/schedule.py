"""Where a step may be cut into several optimizer steps: pure functions of the plan.

The order of units inside a step is ``harts_core.plan.schedule.units``'s.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harts_core.errors import ConfigError
from harts_core.plan.bundle import CONSUMER, PlanBundle
from harts_core.plan.schedule.units import UnitLinks


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
