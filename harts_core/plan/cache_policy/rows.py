"""What units read of tokens that other units computed, from the plan's tables alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import NONE, PlanBundle
from harts_core.trees.rollout_tree import RolloutTree

Int64 = npt.NDArray[np.int64]
Table = Literal["conv", "replay", "keys", "hidden", "states"]
POINT_TABLES: tuple[Table, ...] = ("conv", "replay", "hidden", "states")
"""Tables of which few tokens have a row; of keys and values every ancestor has one."""
CONV_CONTEXT = 3
"""Ancestors whose convolution inputs a sequence reads."""
_SHIFT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBytes:
    """Bytes of one row in each table, all layers together (a state: of one boundary).

    Attributes:
        conv, replay, keys, hidden, states: of the values.
        conv_gradient, …: of their gradients; 0 where they are not counted.
    """

    conv: int = 0
    replay: int = 0
    keys: int = 0
    hidden: int = 0
    states: int = 0
    conv_gradient: int = 0
    replay_gradient: int = 0
    keys_gradient: int = 0
    hidden_gradient: int = 0
    states_gradient: int = 0

    def value(self, table: Table) -> int:
        """Bytes of a row's values."""
        return int(getattr(self, table))

    def gradient(self, table: Table) -> int:
        """Bytes of a row's gradient."""
        return int(getattr(self, f"{table}_gradient"))


TOKENS = RowBytes(keys=1, keys_gradient=1)
"""Counts tokens instead of bytes: one for a token's keys and values, one for their gradient."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportLines:
    """The imported spans of a plan, one entry each.

    Attributes:
        unit: int64, the reader.
        line: int64, the line in the spans table of the owner's span that contains it.
        start, stop: int64, token positions.
        keys: bool, the reader attends to it: some span that it computes lies below.
    """

    unit: Int64
    line: Int64
    start: Int64
    stop: Int64
    keys: npt.NDArray[np.bool_]


def import_lines(bundle: PlanBundle) -> ImportLines:
    """All imports of a plan, in the order of the spans table."""
    spans, offsets = bundle.spans, bundle.span_offsets
    attended = spans.owner == spans.unit
    parent = np.where(spans.parent == NONE, NONE, offsets[spans.unit] + spans.parent)
    for i in range(len(spans) - 1, -1, -1):  # parents come first
        if attended[i] and parent[i] != NONE:
            attended[parent[i]] = True
    mine = np.flatnonzero(spans.owner != spans.unit)
    return ImportLines(
        unit=spans.unit[mine].astype(np.int64),
        line=np.asarray(offsets[spans.owner[mine]] + spans.owner_span[mine], np.int64),
        start=spans.start[mine].astype(np.int64),
        stop=spans.stop[mine].astype(np.int64),
        keys=attended[mine],
    )


def point_rows(bundle: PlanBundle, tree: RolloutTree | None) -> dict[Table, Int64]:
    """The tokens of which some other unit reads a row, in the tables where only few have one.

    Args:
        bundle: a valid plan.
        tree: its rollout tree, which says where final hidden states are read; None: none are counted.

    Returns:
        For each table int64, increasing and distinct: ``row_code`` of the owner's line and the position. A
        boundary state is at the last token that it has seen.
    """
    codes: dict[Table, list[Int64]] = {table: [np.empty(0, np.int64)] for table in POINT_TABLES}
    spans, sequences, offsets = bundle.spans, bundle.sequences, bundle.span_offsets
    first = sequences.spans.values[sequences.spans.offsets[:-1]] if len(sequences) else np.empty(0, np.int32)
    for i, (unit, span, entry) in enumerate(
        zip(sequences.unit.tolist(), first.tolist(), sequences.replay_start.tolist(), strict=True)
    ):
        line = int(offsets[unit]) + span
        start = int(spans.start[line])
        codes["conv"].extend(_imported_ancestors(bundle, line, start - CONV_CONTEXT, start))
        codes["replay"].extend(_imported_ancestors(bundle, line, entry, start))
        source = int(sequences.state_unit[i])
        if source not in (NONE, unit):
            owner_line = int(offsets[source]) + int(sequences.state_span[i])
            codes["states"].append(row_code(owner_line, np.array([sequences.state_position[i] - 1])))
    if tree is not None:
        codes["hidden"].extend(_hidden_rows(bundle, tree))
    return {table: np.unique(np.concatenate(found)) for table, found in codes.items()}


def row_code(line: int | Int64, position: Int64) -> Int64:
    """One integer for a token of a line of the spans table; sorted by line, then position."""
    return np.asarray((np.asarray(line, np.int64) << _SHIFT) + position, np.int64)


def _imported_ancestors(bundle: PlanBundle, line: int, start: int, stop: int) -> Iterator[Int64]:
    """Codes of the imported tokens at [start, stop) on the path above a line of the spans table."""
    spans = bundle.spans
    unit = int(spans.unit[line])
    base = int(bundle.span_offsets[unit])
    while stop > start and spans.parent[line] != NONE:
        line = base + int(spans.parent[line])
        low = max(start, int(spans.start[line]))
        if spans.owner[line] != unit and low < stop:
            yield row_code(_owner_line(bundle, line), np.arange(low, min(stop, int(spans.stop[line]))))
        stop = min(stop, int(spans.start[line]))


def _hidden_rows(bundle: PlanBundle, tree: RolloutTree) -> Iterator[Int64]:
    """Codes of the imported tokens from which a trained position is predicted."""
    spans, table = bundle.spans, bundle.assignments
    for i in range(len(table)):
        trained = tree.trained_positions(int(table.row[i])).astype(np.int64)
        rows = trained[(trained >= table.start[i]) & (trained < table.stop[i])] - 1
        unit = int(table.unit[i])
        base = int(bundle.span_offsets[unit])
        span = int(table.span[i])
        while span != NONE and len(rows):
            line = base + span
            inside = (rows >= spans.start[line]) & (rows < spans.stop[line])
            if spans.owner[line] != unit and inside.any():
                yield row_code(_owner_line(bundle, line), rows[inside])
            rows = rows[rows < spans.start[line]]
            span = int(spans.parent[line])


def _owner_line(bundle: PlanBundle, line: int) -> int:
    return int(bundle.span_offsets[bundle.spans.owner[line]]) + int(bundle.spans.owner_span[line])
