"""Layouts: which token runs each unit of a plan holds, computes and evaluates.

A layout is everything that a planner decides. :func:`layout_consumers` makes the layout of a plan without
producers from a partition of the rows; planners with producers, or that split trajectories, fill the same
tables with imported spans. :func:`harts_core.plan.build.finish_bundle` completes any layout to a bundle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import CONSUMER, NONE, AssignmentTable, SpanTable, WindowTable
from harts_core.trees.neighbours import neighbour_lcp
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.segments import build_segment_tree

Int32 = npt.NDArray[np.int32]
SHARING = ("tree", "none", "group")
TOKEN_WISE = "token_wise_from_slot"
"""Manifest parameter of plans that split trajectories: from this slot on, the capacity bounds the tokens that
a consumer computes; its layout, with the ancestors that it imports, may be larger."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The units of a plan with their spans; costs, sequences and metrics follow from it.

    Attributes:
        replica, kind, window, slot, order: int32 [units], as in UnitTable.
        windows, spans, assignments: as in the bundle.
        sharing: "tree", "none" or "group".
        parameters: what the planner settled itself, for the manifest (JSON-able).
    """

    replica: Int32
    kind: Int32
    window: Int32
    slot: Int32
    order: Int32
    windows: WindowTable
    spans: SpanTable
    assignments: AssignmentTable
    sharing: str
    parameters: dict[str, Any] = field(default_factory=dict)


def append_slots(first: Layout, second: Layout, dp: int) -> Layout:
    """One layout with the slots of ``second`` behind those of ``first``.

    Args:
        first: any layout.
        second: a layout of other rows, without windows, with the same sharing.
        dp: D, of both.
    """
    units = len(first.replica)
    slots = int(first.slot.max()) + 1
    before = np.bincount(first.replica, minlength=dp).astype(np.int32)  # units that run first
    both = {
        name: np.concatenate([getattr(first.spans, name), getattr(second.spans, name)])
        for name in SpanTable.__slots__
    }
    for name in ("unit", "owner"):
        both[name][len(first.spans) :] += units
    lines = {
        name: np.concatenate([getattr(first.assignments, name), getattr(second.assignments, name)])
        for name in AssignmentTable.__slots__
    }
    lines["unit"][len(first.assignments) :] += units
    lines["slot"][len(first.assignments) :] += slots
    by_row = np.lexsort((lines["start"], lines["row"]))
    return Layout(
        replica=np.concatenate([first.replica, second.replica]),
        kind=np.concatenate([first.kind, second.kind]),
        window=np.concatenate([first.window, second.window]),
        slot=np.concatenate([first.slot, second.slot + slots]),
        order=np.concatenate([first.order, second.order + before[second.replica]]),
        windows=first.windows,
        spans=SpanTable(**both),
        assignments=AssignmentTable(**{name: values[by_row] for name, values in lines.items()}),
        sharing=first.sharing,
        parameters={**first.parameters, **second.parameters, TOKEN_WISE: slots},
    )


def run_starts(keys: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """bool [M], True where a key differs from the one before it (and at the first)."""
    first = np.ones(len(keys), np.bool_)
    first[1:] = keys[1:] != keys[:-1]
    return first


def layout_consumers(tree: RolloutTree, *, dp: int, replica: Int32, slot: Int32, sharing: str) -> Layout:
    """The layout of consumers without producers.

    A unit is a (slot, replica) pair that has rows; unit ids count them slot by slot. With sharing "tree" a
    unit's spans are the segments of its rows' prefix tree; with "none" every row is its own span; with
    "group" the rows of one group share the one prefix common to all of them in the unit.

    Args:
        tree: the rollout tree.
        dp: D, the number of replicas.
        replica, slot: int32 [N], where each row is evaluated; −1 (both) where it was dropped.
        sharing: one of SHARING.

    Raises:
        ValueError: another ``sharing``.
    """
    rows = np.flatnonzero(slot >= 0).astype(np.int32)
    key = slot[rows].astype(np.int64) * dp + replica[rows]
    if sharing == "group":
        group = np.unique(np.array(tree.group_id), return_inverse=True)[1][rows]
        order = np.lexsort((rows, group, key))
        group = group[order]
    else:
        order = np.lexsort((rows, key))
    rows, key = rows[order], key[order]
    first = run_starts(key)
    if sharing == "tree":
        lcp = neighbour_lcp(tree.lcp, rows, first)
    elif sharing == "none":
        lcp = np.zeros(len(rows), np.int32)
    elif sharing == "group":
        first_of_group = first | run_starts(group)
        lcp = neighbour_lcp(tree.lcp, rows, first_of_group)
        begins = np.flatnonzero(first_of_group)
        sizes = np.diff(np.append(begins, len(rows)))
        own = np.where(first_of_group, tree.length[rows], lcp)  # a group of one shares its whole row
        lcp = np.where(first_of_group, 0, np.repeat(np.minimum.reduceat(own, begins), sizes))
    else:
        raise ValueError(f"sharing must be one of {SHARING}, not {sharing!r}")
    unit_key, unit_of_row = np.unique(key, return_inverse=True)
    # No prefix is shared across units (lcp is 0 where one begins), so one pass gives the forests of all.
    segments = build_segment_tree(tree.length[rows], lcp)
    unit = unit_of_row[segments.row]
    offset = np.searchsorted(unit, np.arange(len(unit_key)))
    spans = np.arange(len(segments)) - offset[unit]
    unit_replica, unit_slot = unit_key % dp, unit_key // dp
    back = np.argsort(rows)  # assignments are listed by row
    return Layout(
        replica=unit_replica.astype(np.int32),
        kind=np.full(len(unit_key), CONSUMER, np.int32),
        window=np.full(len(unit_key), NONE, np.int32),
        slot=unit_slot.astype(np.int32),
        order=unit_slot.astype(np.int32),
        windows=WindowTable(slot_start=np.empty(0, np.int32), slot_stop=np.empty(0, np.int32)),
        spans=SpanTable(
            unit=unit,
            span=spans,
            parent=np.where(segments.parent < 0, NONE, segments.parent - offset[unit]),
            start=segments.start,
            stop=segments.stop,
            row=rows[segments.row],
            owner=unit,
            owner_span=spans,
        ),
        assignments=AssignmentTable(
            row=rows[back],
            replica=unit_replica[unit_of_row][back],
            slot=unit_slot[unit_of_row][back],
            unit=unit_of_row[back],
            start=np.zeros(len(rows), np.int32),
            stop=tree.length[rows][back],
            span=(segments.row_segment - offset[unit_of_row])[back],
        ),
        sharing=sharing,
    )
