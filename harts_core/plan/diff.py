"""How two plans differ: manifests, metrics, and which trajectories moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from harts_core.plan.bundle import KINDS, NONE, PlanBundle
from harts_core.plan.bundle_file import bundle_to_tables

NUM_MOVED_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One entry of plan.json that differs (None: absent), for example ``parameters.capacity``."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricChange:
    """One metric that differs; ``delta`` = b − a (None if it is absent on one side)."""

    name: str
    a: float | None
    b: float | None
    delta: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TableChange:
    """One table: its lines on both sides, and whether all values are equal."""

    table: str
    lines_a: int
    lines_b: int
    same: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where positions [start, stop) of a trajectory are evaluated."""

    replica: int
    slot: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A trajectory (row of the tree) that is evaluated elsewhere; an empty side: not in that plan."""

    row: int
    a: tuple[Place, ...]
    b: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlace:
    """A unit by its place in the schedule: a consumer's slot or a producer's window on a replica.

    ``index`` tells units of the same place apart, in forward order.
    """

    kind: str
    replica: int
    slot: int | None
    window: int | None
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDiff:
    """The difference of two plans.

    Attributes:
        same: whether they are equal in everything that is hashed.
        manifest: differing entries of planner, parameters, cost_model and tree_sha256.
        metrics: differing metrics.
        tables: all five tables.
        same_tree: whether both are plans of one rollout tree; only then rows can be compared.
        num_moved: trajectories evaluated in another slot or on another replica; None with other trees.
        moved: the first few of them.
        units_added, units_removed: units whose place only plan b, only plan a has.
        units_changed: units at the same place with other token counts.
    """

    same: bool
    manifest: tuple[Change, ...]
    metrics: tuple[MetricChange, ...]
    tables: tuple[TableChange, ...]
    same_tree: bool
    num_moved: int | None
    moved: tuple[Move, ...]
    units_added: tuple[UnitPlace, ...]
    units_removed: tuple[UnitPlace, ...]
    units_changed: int


def diff_plans(a: PlanBundle, b: PlanBundle) -> PlanDiff:
    """Compare two plans (runtime.json is not compared)."""
    manifest = _manifest_changes(a, b)
    metrics = _metric_changes(a.metrics, b.metrics)
    tables = _table_changes(a, b)
    same_tree = a.tree_sha256 == b.tree_sha256
    moved = _moves(a, b) if same_tree else ()
    units_a, units_b = _unit_places(a), _unit_places(b)
    return PlanDiff(
        same=not manifest and not metrics and all(t.same for t in tables),
        manifest=manifest,
        metrics=metrics,
        tables=tables,
        same_tree=same_tree,
        num_moved=len(moved) if same_tree else None,
        moved=moved[:NUM_MOVED_SHOWN],
        units_added=tuple(place for place in units_b if place not in units_a),
        units_removed=tuple(place for place in units_a if place not in units_b),
        units_changed=sum(tokens != units_b.get(place, tokens) for place, tokens in units_a.items()),
    )


def _manifest_changes(a: PlanBundle, b: PlanBundle) -> tuple[Change, ...]:
    flat_a, flat_b = _flat_manifest(a), _flat_manifest(b)
    names = sorted(flat_a.keys() | flat_b.keys())
    return tuple(
        Change(name=n, a=flat_a.get(n), b=flat_b.get(n)) for n in names if flat_a.get(n) != flat_b.get(n)
    )


def _flat_manifest(bundle: PlanBundle) -> dict[str, Any]:
    flat: dict[str, Any] = {"planner": bundle.planner, "tree_sha256": bundle.tree_sha256}
    for table in ("parameters", "cost_model"):
        flat |= {f"{table}.{name}": value for name, value in getattr(bundle, table).items()}
    return flat


def _metric_changes(a: dict[str, Any], b: dict[str, Any]) -> tuple[MetricChange, ...]:
    changes = []
    for name in sorted(a.keys() | b.keys()):
        old, new = a.get(name), b.get(name)
        if old != new:
            delta = None if old is None or new is None else new - old
            changes.append(MetricChange(name=name, a=old, b=new, delta=delta))
    return tuple(changes)


def _table_changes(a: PlanBundle, b: PlanBundle) -> tuple[TableChange, ...]:
    tables_a, tables_b = bundle_to_tables(a), bundle_to_tables(b)
    return tuple(
        TableChange(
            table=name,
            lines_a=table.num_rows,
            lines_b=tables_b[name].num_rows,
            same=table.equals(tables_b[name]),
        )
        for name, table in tables_a.items()
    )


def _moves(a: PlanBundle, b: PlanBundle) -> tuple[Move, ...]:
    places_a, places_b = _places(a), _places(b)
    return tuple(
        Move(row=row, a=places_a.get(row, ()), b=places_b.get(row, ()))
        for row in sorted(places_a.keys() | places_b.keys())
        if places_a.get(row) != places_b.get(row)
    )


def _places(bundle: PlanBundle) -> dict[int, tuple[Place, ...]]:
    table = bundle.assignments
    columns = (table.row, table.replica, table.slot, table.start, table.stop)
    places: dict[int, tuple[Place, ...]] = {}
    for row, replica, slot, start, stop in np.stack(columns, axis=1).tolist():
        place = Place(replica=replica, slot=slot, start=start, stop=stop)
        places[row] = (*places.get(row, ()), place)
    return places


def _unit_places(bundle: PlanBundle) -> dict[UnitPlace, tuple[int, int]]:
    """Place → (complete, computed) tokens of every unit."""
    units = bundle.units
    seen: dict[tuple[int, int, int, int], int] = {}
    places = {}
    for u in np.lexsort((units.order, units.replica)).tolist():
        key = (int(units.kind[u]), int(units.replica[u]), int(units.slot[u]), int(units.window[u]))
        index = seen[key] = seen.get(key, -1) + 1
        place = UnitPlace(
            kind=KINDS[key[0]],
            replica=key[1],
            slot=None if key[2] == NONE else key[2],
            window=None if key[3] == NONE else key[3],
            index=index,
        )
        places[place] = (int(units.complete_tokens[u]), int(units.computed_tokens[u]))
    return places
