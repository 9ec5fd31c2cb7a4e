"""Layouts with producers: nested levels of sharing windows over the slots.

A planner states its producers by depth: at every level each row names how many of its leading tokens the
producers down to that level hold. That is enough, because what a producer holds is closed under prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import CONSUMER, NONE, PRODUCER, AssignmentTable, SpanTable, WindowTable
from harts_core.plan.layout import Layout, run_starts
from harts_core.trees.neighbours import neighbour_lcp
from harts_core.trees.ragged import read_only
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.segments import SegmentTree, build_segment_tree

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProducerLevel:
    """One level of windows, and the tokens that its producers and those of outer levels hold.

    Attributes:
        window_of_slot: int32 [J], the level's window of each slot: 0, 1, … in runs. A window lies inside one
            window of the level outside it.
        depth: int32 [N], leading tokens of each row held down to this level; not below the outer level's,
            at most the row's length. Rows of one window and replica that share p tokens agree on
            min(depth, p).
    """

    window_of_slot: Int32
    depth: Int32

    def __post_init__(self) -> None:
        for name in ("window_of_slot", "depth"):
            object.__setattr__(self, name, read_only(np.asarray(getattr(self, name), np.int32)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Units:
    """The units of one level (the consumers are the last level), sorted by (window or slot, replica).

    Attributes:
        kind: PRODUCER or CONSUMER.
        place, replica: int32 [units], the window of the level (consumers: the slot) and the replica.
        rows: int32 [M], the rows of all units, unit by unit, ascending in each.
        unit: int64 [M], the unit of each, counted from 0 within the level.
        tree: the prefix trees of all units, in terms of ``rows``.
    """

    kind: int
    place: Int32
    replica: Int32
    rows: Int32
    unit: Int64
    tree: SegmentTree


@dataclass(slots=True, kw_only=True)
class _Lines:
    """The span table as it grows, level by level; unit ids and lines count over all levels."""

    unit: Int64
    parent: Int64
    start: Int64
    stop: Int64
    row: Int64
    owner: Int64

    def append(self, more: Sequence[Int64]) -> None:
        for name, values in zip(self.__slots__, more, strict=True):
            setattr(self, name, np.concatenate([getattr(self, name), values]))


def layout_windows(
    tree: RolloutTree, *, dp: int, replica: Int32, slot: Int32, levels: Sequence[ProducerLevel]
) -> Layout:
    """The layout of consumers that share producers.

    Unit ids count the producers level by level (outermost first), then the consumers slot by slot. A
    producer exists where it computes something, a window where it has a producer. Spans are cut at forks
    and where the unit that computes them, or its own spans, change.

    Args:
        tree: the rollout tree.
        dp: D, the number of replicas.
        replica, slot: int32 [N], where each row is evaluated; −1 (both) where it was dropped.
        levels: outermost first; may be empty.
    """
    placed = np.flatnonzero(slot >= 0).astype(np.int32)
    held = np.zeros((len(levels) + 1, tree.num_rows), np.int32)  # by the levels outside each level
    for i, level in enumerate(levels):
        held[i + 1] = level.depth
    units: list[_Units] = []
    lines = _Lines(**{name: np.empty(0, np.int64) for name in _Lines.__slots__})
    last = np.full((len(levels) + 1, tree.num_rows), -1, np.int64)
    num_units = 0
    for i in range(len(levels) + 1):
        if i < len(levels):
            rows = placed[held[i + 1][placed] > held[i][placed]]
            place, depth = levels[i].window_of_slot[slot[rows]], held[i + 1]
            found = _level_units(tree, PRODUCER, rows, place, replica[rows], depth, dp)
        else:
            depth = tree.length
            found = _level_units(tree, CONSUMER, placed, slot[placed], replica[placed], depth, dp)
        units.append(found)
        segments = found.tree
        more, ends = _cut_spans(
            segments.parent, segments.start, segments.stop, found.rows[segments.row],
            num_units + found.unit[segments.row], held[: i + 1], last, lines.unit, lines.parent, lines.start,
        )  # fmt: skip
        lines.append(more)
        _find_last(lines.parent, lines.start, ends[segments.row_segment], found.rows, depth, last[i])
        num_units += len(found.place)
    return _layout(tree, units, levels, lines, last[-1], placed, dp)


def _level_units(
    tree: RolloutTree, kind: int, rows: Int32, place: Int32, replica: Int32, depth: Int32, dp: int
) -> _Units:
    """The units that hold the first ``depth`` tokens of the given rows."""
    key = place.astype(np.int64) * dp + replica
    order = np.lexsort((rows, key))
    rows, key = rows[order], key[order]
    first = run_starts(key)
    length = depth[rows]
    lcp = neighbour_lcp(tree.lcp, rows, first)
    lcp[1:] = np.minimum(lcp[1:], np.minimum(length[1:], length[:-1]))
    unit_key, unit = np.unique(key, return_inverse=True)
    return _Units(
        kind=kind,
        place=(unit_key // dp).astype(np.int32),
        replica=(unit_key % dp).astype(np.int32),
        rows=rows,
        unit=unit,
        tree=build_segment_tree(length, lcp),
    )


@numba.njit(cache=True)
def _cut_spans(
    parent: Any, start: Any, stop: Any, row: Any, unit: Any, held: Any, last: Any,
    line_unit: Any, line_parent: Any, line_start: Any,
) -> Any:  # fmt: skip
    """Spans of one level's segments: (unit, parent, start, stop, row, owner), and each segment's last line.

    ``held[m]`` are the tokens that levels before m hold, ``last[m, row]`` the line of level m with the
    row's last held token. A segment is walked from its end to its start, each time along the spans of the
    level that holds the position.
    """
    base, levels = len(line_unit), len(held) - 1
    out_unit, out_row, out_owner = [np.int64(0)][:0], [np.int64(0)][:0], [np.int64(0)][:0]
    out_parent, out_start, out_stop = [np.int64(0)][:0], [np.int64(0)][:0], [np.int64(0)][:0]
    ends = np.empty(len(parent), np.int64)
    cut = [np.int64(0)][:0]
    owners = [np.int64(0)][:0]
    for i in range(len(parent)):
        x = row[i]
        cut.clear()
        owners.clear()
        position = np.int64(stop[i])
        while position > start[i]:
            m = levels
            while m > 0 and held[m, x] >= position:
                m -= 1
            if m == levels:  # computed here
                owner = np.int64(unit[i])
                low = np.int64(max(start[i], held[m, x]))
            else:
                line = last[m, x]
                while line_start[line] >= position:
                    line = line_parent[line]
                owner = -1 - line
                low = np.int64(max(start[i], line_start[line]))
            cut.append(low)
            owners.append(owner)
            position = low
        above = ends[parent[i]] if parent[i] >= 0 else np.int64(-1)
        for k in range(len(cut) - 1, -1, -1):
            out_unit.append(np.int64(unit[i]))
            out_parent.append(above)
            out_start.append(cut[k])
            out_stop.append(cut[k - 1] if k else np.int64(stop[i]))
            out_row.append(np.int64(x))
            out_owner.append(owners[k])
            above = np.int64(base + len(out_unit) - 1)
        ends[i] = above
    table = (
        np.array(out_unit), np.array(out_parent), np.array(out_start),
        np.array(out_stop), np.array(out_row), np.array(out_owner),
    )  # fmt: skip
    return table, ends


@numba.njit(cache=True)
def _find_last(line_parent: Any, line_start: Any, end: Any, rows: Any, depth: Any, last: Any) -> None:
    """last[row] = the line that holds position depth[row] − 1, at or above the row's segment's end."""
    for i in range(len(rows)):
        line = end[i]
        while line_start[line] >= depth[rows[i]]:
            line = line_parent[line]
        last[rows[i]] = line


def _layout(
    tree: RolloutTree,
    units: list[_Units],
    levels: Sequence[ProducerLevel],
    lines: _Lines,
    last: Int64,
    placed: Int32,
    dp: int,
) -> Layout:
    """Number windows, orders and spans, and list the assignments."""
    windows, window, begins = _windows(levels, units)
    rank = np.repeat(np.arange(len(units)), [len(u.place) for u in units])
    replica = np.concatenate([u.replica for u in units])
    none = np.full(len(replica) - len(units[-1].place), NONE, np.int32)
    slot = np.concatenate([none, units[-1].place])
    offset = np.searchsorted(lines.unit, np.arange(len(replica) + 1))
    owner_line = np.where(lines.owner < 0, -1 - lines.owner, np.arange(len(lines.unit)))
    owner = lines.unit[owner_line]
    unit_of_row = lines.unit[last[placed]].astype(np.int32)
    return Layout(
        replica=replica,
        kind=np.concatenate([np.full(len(u.place), u.kind, np.int32) for u in units]),
        window=window,
        slot=slot,
        order=_orders(replica, begins, rank, dp),
        windows=windows,
        spans=SpanTable(
            unit=lines.unit.astype(np.int32),
            span=_index_in_unit(offset, lines.unit, np.arange(len(lines.unit))),
            parent=np.where(lines.parent < 0, NONE, _index_in_unit(offset, lines.unit, lines.parent)),
            start=lines.start.astype(np.int32),
            stop=lines.stop.astype(np.int32),
            row=lines.row.astype(np.int32),
            owner=owner.astype(np.int32),
            owner_span=_index_in_unit(offset, owner, owner_line),
        ),
        assignments=AssignmentTable(
            row=placed,
            replica=replica[unit_of_row],
            slot=slot[unit_of_row],
            unit=unit_of_row,
            start=np.zeros(len(placed), np.int32),
            stop=tree.length[placed],
            span=_index_in_unit(offset, unit_of_row, last[placed]),
        ),
        sharing="tree",
    )


def _index_in_unit(offset: npt.NDArray[Any], unit: npt.NDArray[Any], line: npt.NDArray[Any]) -> Int32:
    """The span index of a line in its unit."""
    return np.asarray(line - offset[unit], np.int32)


def _windows(levels: Sequence[ProducerLevel], units: list[_Units]) -> tuple[WindowTable, Int32, Int32]:
    """The windows that have a producer; the window of every unit; the slot where each unit begins."""
    consumers = units[-1]
    starts: list[npt.NDArray[Any]] = []
    stops: list[npt.NDArray[Any]] = []
    window: list[npt.NDArray[Any]] = []
    begins: list[npt.NDArray[Any]] = []
    innermost = np.full(int(consumers.place.max()) + 1, NONE, np.int32)
    count = 0
    for level, found in zip(levels, units[:-1], strict=True):
        kept, index = np.unique(found.place, return_inverse=True)
        start = np.searchsorted(level.window_of_slot, kept)
        stop = np.searchsorted(level.window_of_slot, kept, side="right")
        of_slot = np.full(int(level.window_of_slot[-1]) + 1, NONE, np.int32)
        of_slot[kept] = np.arange(count, count + len(kept))
        here = of_slot[level.window_of_slot]
        innermost = np.where(here == NONE, innermost, here)
        window.append(count + index)
        begins.append(start[index])
        starts.append(start)
        stops.append(stop)
        count += len(kept)
    table = WindowTable(
        slot_start=np.concatenate([*starts, np.empty(0, np.int32)]),
        slot_stop=np.concatenate([*stops, np.empty(0, np.int32)]),
    )
    window.append(innermost[consumers.place])
    begins.append(consumers.place)
    return table, np.concatenate(window).astype(np.int32), np.concatenate(begins).astype(np.int32)


def _orders(replica: Int32, begins: Int32, rank: Int64, dp: int) -> Int32:
    """Forward orders: by the slot where a unit begins, producers (outer ones first) before the consumer."""
    order = np.empty(len(replica), np.int32)
    sequence = np.lexsort((rank, begins, replica))
    counts = np.bincount(replica, minlength=dp)
    order[sequence] = np.concatenate([np.arange(n) for n in counts])
    return order
