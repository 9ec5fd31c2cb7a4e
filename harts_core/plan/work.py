"""How even a plan's estimated work is, and how much of it is alive at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import CONSUMER, PlanBundle, UnitTable
from harts_core.plan.schedule.units import peak_alive, unit_events, unit_links

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkReport:
    """Estimated work (cost model, forward and backward) of a plan.

    Attributes:
        replica_balance: mean over max of the replicas' work.
        replica_range: (max − min) / mean of the replicas' work.
        microbatch_spread: coefficient of variation of the work of a replica's microbatches, mean over
            replicas.
        step_cost: Φ of the whole step: every slot's and window's forward and backward at the pace of their
            slowest replica; in the cost model's unit.
        second_forward_cost: what ``recompute = "unit"`` adds to it: the forwards of units that others import
            from, once more.
        peak_alive_tokens: most computed tokens on a replica that wait for their backward at once; with
            everything kept, these are the activations in memory.
    """

    replica_balance: float
    replica_range: float
    microbatch_spread: float
    step_cost: float
    second_forward_cost: float
    peak_alive_tokens: int


def work_report(bundle: PlanBundle) -> WorkReport:
    """The report of a valid plan."""
    units = bundle.units
    cost = units.cost_forward + units.cost_backward
    replicas = np.bincount(units.replica, cost, minlength=bundle.dp).astype(np.float64)
    consumer = units.kind == CONSUMER
    spreads = []
    for d in range(bundle.dp):
        mine = cost[consumer & (units.replica == d)]
        spreads.append(float(mine.std() / mine.mean()))
    links = unit_links(bundle)
    awaited = np.array([len(importers) > 0 for importers in links.importers])
    alive = (
        peak_alive(unit_events(links, bundle.units_of_replica(d).tolist()), units.padded_tokens)
        for d in range(bundle.dp)
    )
    return WorkReport(
        replica_balance=float(replicas.mean() / replicas.max()),
        replica_range=relative_range(replicas),
        microbatch_spread=float(np.mean(spreads)),
        step_cost=_paced_cost(units, units.cost_forward) + _paced_cost(units, units.cost_backward),
        second_forward_cost=_paced_cost(units, np.where(awaited, units.cost_forward, 0.0)),
        peak_alive_tokens=max(alive),
    )


def _paced_cost(units: UnitTable, cost: Float64) -> float:
    """The sum over slots and windows of their costliest unit."""
    place = np.where(units.kind == CONSUMER, units.slot, int(units.slot.max()) + 1 + units.window)
    slowest = np.zeros(int(place.max()) + 1)
    np.maximum.at(slowest, place, cost)
    return float(slowest.sum())


def relative_range(values: Float64) -> float:
    """(max − min) / mean of positive values."""
    return float((values.max() - values.min()) / values.mean())
