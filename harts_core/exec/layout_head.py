"""Which log-probabilities a unit evaluates, and how often each of its tokens occurs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harts_core.exec.layout_rows import UnitRows
from harts_core.plan.bundle import NONE, PlanBundle
from harts_core.trees.rollout_tree import RolloutTree

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadLayout:
    """Distinct (row, label) pairs and the trained positions that read them.

    Position t of a trajectory is predicted from the hidden state of position t − 1 on the same path.

    Attributes:
        rows: int64 [R], distinct rows that predict a trained position, increasing.
        label_offsets: int64 [R + 1], the labels of rows[r] are labels[label_offsets[r]:label_offsets[r + 1]].
        labels: int64 [L], token ids, distinct within a row.
        trained_label: int64 [n], for each trained position of the unit its index into ``labels``.
        trained_row: int64 [n], its tree row; the positions are ordered by (row, position).
        trained_index: int64 [n], which of the row's trained positions it is.
        occurrences: int64 [C], semantic positions of the step at each own token.
    """

    rows: Int64
    label_offsets: Int64
    labels: Int64
    trained_label: Int64
    trained_row: Int64
    trained_index: Int64
    occurrences: Int64

    def with_rows(self, rows: Int64) -> HeadLayout:
        """The same layout over another numbering of the rows."""
        return replace(self, rows=rows)


def build_head_layout(bundle: PlanBundle, tree: RolloutTree, unit: int, rows: UnitRows) -> HeadLayout:
    """Collect the trained positions of the unit's assignments."""
    table = bundle.assignments
    source: list[Int64] = [np.empty(0, np.int64)]
    label: list[Int64] = [np.empty(0, np.int64)]
    tree_row: list[Int64] = [np.empty(0, np.int64)]
    index: list[Int64] = [np.empty(0, np.int64)]
    for line in np.flatnonzero(table.unit == unit):
        start, stop, row = int(table.start[line]), int(table.stop[line]), int(table.row[line])
        path = np.array(rows.path(int(table.span[line])))
        trained = tree.trained_positions(row).astype(np.int64)
        mine = np.flatnonzero((trained >= start) & (trained < stop))
        source.append(_rows_at(rows, path, trained[mine] - 1))
        label.append(rows.tokens[_rows_at(rows, path, trained[mine])])
        tree_row.append(np.full(len(mine), row, np.int64))
        index.append(mine.astype(np.int64))
    vocab = int(rows.tokens.max()) + 1 if len(rows.tokens) else 1
    pairs, trained_label = np.unique(
        np.concatenate(source) * vocab + np.concatenate(label), return_inverse=True
    )
    head_rows, first = np.unique(pairs // vocab, return_index=True)
    return HeadLayout(
        rows=head_rows,
        label_offsets=np.append(first, len(pairs)).astype(np.int64),
        labels=pairs % vocab,
        trained_label=trained_label.astype(np.int64),
        trained_row=np.concatenate(tree_row),
        trained_index=np.concatenate(index),
        occurrences=_occurrences(bundle, unit, rows),
    )


def _rows_at(rows: UnitRows, path: Int64, positions: Int64) -> Int64:
    """Rows of token positions along a root-to-span path."""
    span = path[np.searchsorted(rows.span_start[path], positions, side="right") - 1]
    return np.asarray(rows.span_row[span] + positions - rows.span_start[span])


def _occurrences(bundle: PlanBundle, unit: int, rows: UnitRows) -> Int64:
    """How often trajectories pass through the unit's own tokens, in its assignments and its importers'."""
    spans, table = bundle.spans, bundle.assignments
    change = np.zeros(rows.num_rows + 1, np.int64)  # differences of the counts
    for reader in np.unique(spans.unit[spans.owner == unit]):
        lines = slice(bundle.span_offsets[reader], bundle.span_offsets[reader + 1])
        mine, source = spans.owner[lines] == unit, spans.owner_span[lines]
        parent, span_start, span_stop = (c[lines] for c in (spans.parent, spans.start, spans.stop))
        for line in np.flatnonzero(table.unit == reader):
            span, found = int(table.span[line]), []
            while span != NONE:
                if mine[span]:
                    found.append(span)
                span = int(parent[span])
            path = np.array(found, np.int64)
            low = np.maximum(span_start[path], table.start[line])
            high = np.minimum(span_stop[path], table.stop[line])
            path, low, high = path[low < high], low[low < high], high[low < high]
            offset = rows.span_row[source[path]] - rows.span_start[source[path]]
            np.add.at(change, offset + low, 1)
            np.add.at(change, offset + high, -1)
    return np.cumsum(change[:-1])
