"""Plans whose replicas run the same calls in the same order.

The ranks of an expert-parallel group exchange tokens in every expert layer, forward and backward. Where such
a group spans several replicas, all of them must run the same units together: a replica that lacks a producer
runs an empty one in its place, and a backward waits until it may run on every replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harts_core.errors import ExecError
from harts_core.plan.bundle import CONSUMER, NONE, PlanBundle, UnitTable
from harts_core.plan.schedule.units import UnitLinks, unit_links

Role = tuple[int, int, int, int]
"""(first slot, 0 for a producer and 1 for a consumer, −last slot, window): sorts into forward order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LockstepPlan:
    """A plan in which every replica has the same roles.

    Attributes:
        bundle: the plan; units from the original number on are empty.
        links: who imports from whom on any replica, as if it did on all.
        units: for each replica its units in forward order; role by role the same on all.
    """

    bundle: PlanBundle
    links: UnitLinks
    units: tuple[tuple[int, ...], ...]


def lockstep_plan(bundle: PlanBundle, units: Sequence[int]) -> LockstepPlan:
    """Fill up the replicas of a plan, or of a minibatch of it.

    Args:
        bundle: a validated plan.
        units: the units that run.

    Raises:
        ExecError: two replicas run common units in different orders, or one has two units of one role.
    """
    table = bundle.units
    roles = {unit: _role(bundle, unit) for unit in range(bundle.num_units)}
    wanted = sorted({roles[unit] for unit in units})
    own: list[dict[Role, int]] = [{} for _ in range(bundle.dp)]
    for unit in sorted(units, key=lambda u: int(table.order[u])):
        mine = own[table.replica[unit]]
        if mine and next(reversed(mine)) >= roles[unit]:
            raise ExecError(
                "Expert parallelism over replicas needs units in the order of their slots, producers first.",
                where=f"unit {unit}, replica {table.replica[unit]}",
            )
        mine[roles[unit]] = unit
    added: list[tuple[int, Role]] = []
    complete: list[tuple[int, ...]] = []
    for replica, mine in enumerate(own):
        for role in wanted:
            if role not in mine:
                mine[role] = bundle.num_units + len(added)
                added.append((replica, role))
        complete.append(tuple(mine[role] for role in wanted))
    links = _common_links(unit_links(bundle), roles, own, bundle.num_units + len(added))
    return LockstepPlan(bundle=_with_empty_units(bundle, added), links=links, units=tuple(complete))


def _role(bundle: PlanBundle, unit: int) -> Role:
    if bundle.units.kind[unit] == CONSUMER:
        slot = int(bundle.units.slot[unit])
        return slot, 1, -slot, NONE
    window = int(bundle.units.window[unit])
    return int(bundle.windows.slot_start[window]), 0, -int(bundle.windows.slot_stop[window]), window


def _common_links(
    links: UnitLinks, roles: dict[int, Role], own: list[dict[Role, int]], num_units: int
) -> UnitLinks:
    """Every import of any replica, on every replica."""
    pairs = {(roles[unit], roles[owner]) for unit, owners in enumerate(links.owners) for owner in owners}
    owners: list[list[int]] = [[] for _ in range(num_units)]
    importers: list[list[int]] = [[] for _ in range(num_units)]
    for reader, owner in sorted(pairs):
        for mine in own:
            if reader in mine and owner in mine:
                owners[mine[reader]].insert(0, mine[owner])
                importers[mine[owner]].append(mine[reader])
    return UnitLinks(owners=tuple(map(tuple, owners)), importers=tuple(map(tuple, importers)))


def _with_empty_units(bundle: PlanBundle, added: list[tuple[int, Role]]) -> PlanBundle:
    """The bundle with more units, none of which has a span."""
    table = bundle.units
    first = int(table.order.max()) + 1
    new = {
        "replica": [replica for replica, _ in added],
        "kind": [role[1] for _, role in added],
        "slot": [role[0] if role[1] == CONSUMER else NONE for _, role in added],
        "window": [NONE] * len(added),
        "order": list(range(first, first + len(added))),
    }
    zeros = np.zeros(len(added), np.int64)
    columns = {
        name: np.concatenate([getattr(table, name), np.array(new.get(name, zeros), np.int64)])
        for name in UnitTable.__dataclass_fields__
        if name != "DTYPES"
    }
    return replace(bundle, units=UnitTable(**columns))
