"""How many tokens' activations are alive at once: the part of a plan's memory that the planner decides."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import CONSUMER, PRODUCER, PlanBundle
from harts_core.plan.schedule.units import unit_links


def activation_tokens(bundle: PlanBundle) -> npt.NDArray[np.int64]:
    """int64 [J, D], tokens whose activations are alive while a slot runs on a replica.

    The padded tokens that the slot's consumer computes, and those of the producers of every window that the
    slot lies in: a producer's interfaces and saved activations live from its forward to its backward pass,
    before and after all slots of its window. So does a consumer from which later ones import (plans that
    split trajectories): until the last that imports from it, directly or through others, has run. Times a
    configuration's bytes per token (layers, widths, recomputation) that is the activation memory; keys and
    values gathered from other units for one layer at a time come on top.

    Args:
        bundle: a valid plan.
    """
    u, w = bundle.units, bundle.windows
    consumer, producer = np.flatnonzero(u.kind == CONSUMER), np.flatnonzero(u.kind == PRODUCER)
    num_slots = int(u.slot[consumer].max()) + 1
    change = np.zeros((num_slots + 1, bundle.dp), np.int64)
    window = u.window[producer]
    np.add.at(change, (w.slot_start[window], u.replica[producer]), u.padded_tokens[producer])
    np.add.at(change, (w.slot_stop[window], u.replica[producer]), -u.padded_tokens[producer])
    last = _last_slots(bundle)
    np.add.at(change, (u.slot[consumer], u.replica[consumer]), u.padded_tokens[consumer])
    np.add.at(change, (last[consumer] + 1, u.replica[consumer]), -u.padded_tokens[consumer])
    return np.cumsum(change, axis=0)[:-1]


def _last_slots(bundle: PlanBundle) -> npt.NDArray[np.int64]:
    """int64 [units], the last slot of each consumer and of those that wait for its backward."""
    u, importers = bundle.units, unit_links(bundle).importers
    last = u.slot.astype(np.int64)
    for unit in np.argsort(-u.order, kind="stable").tolist():  # importers run later
        last[unit] = max([last[unit], *(last[i] for i in importers[unit])])
    return last
