"""Rows of a unit: memory order, tokens, and who is whose ancestor."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from harts_core.exec.model.config import CONV_WIDTH
from harts_core.plan.bundle import NONE, PlanBundle
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitRows:
    """Where every token of a unit's complete layout is: own rows [0, num_rows), then all imported ones.

    Attributes:
        num_rows: C, own rows.
        span_parent, span_start, span_stop: int64 [spans].
        span_row: int64 [spans], first row of the span.
        owned: bool [spans].
        sequence_spans: spans of each sequence, in memory order.
        sequence_rows: half-open own rows of each sequence.
        tokens, positions: int64 [C + I].
        import_unit, import_span: int64 [I], owner and the owner's span of each imported token.
    """

    num_rows: int
    span_parent: Int64
    span_start: Int64
    span_stop: Int64
    span_row: Int64
    owned: npt.NDArray[np.bool_]
    sequence_spans: tuple[Int64, ...]
    sequence_rows: tuple[tuple[int, int], ...]
    tokens: Int64
    positions: Int64
    import_unit: Int64
    import_span: Int64
    _runs: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict, repr=False)

    def path(self, span: int) -> list[int]:
        """Spans from the root to ``span``, inclusive."""
        result = []
        while span != NONE:
            result.append(span)
            span = int(self.span_parent[span])
        return result[::-1]

    def ancestor_runs(self, span: int) -> tuple[tuple[int, int], ...]:
        """Runs of rows of the tokens before a span, from the root on; neighbouring runs are merged."""
        todo = []
        at = int(self.span_parent[span])
        while at != NONE and at not in self._runs:
            todo.append(at)
            at = int(self.span_parent[at])
        runs = self._runs[at] if at != NONE else ()
        for s in reversed(todo):
            first = int(self.span_row[s])
            last = first + int(self.span_stop[s] - self.span_start[s])
            if runs and runs[-1][1] == first and (first < self.num_rows) == (runs[-1][0] < self.num_rows):
                runs = (*runs[:-1], (runs[-1][0], last))
            else:
                runs = (*runs, (first, last))
            self._runs[s] = runs
        return runs

    def last_ancestors(self, span: int, count: int) -> Int64:
        """int64, rows of at most ``count`` tokens right before a span, the nearest last."""
        pieces: list[Int64] = []
        for start, stop in reversed(self.ancestor_runs(span)):
            if count <= 0:
                break
            pieces.append(np.arange(max(start, stop - count), stop))
            count -= stop - start
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int64)


def build_unit_rows(
    bundle: PlanBundle, tree: RolloutTree, unit: int, sequences: tuple[Int64, ...]
) -> UnitRows:
    """Lay the unit's tokens out: sequence after sequence, then the imported spans in span order."""
    lines = slice(bundle.span_offsets[unit], bundle.span_offsets[unit + 1])
    table = bundle.spans
    start, stop = table.start[lines].astype(np.int64), table.stop[lines].astype(np.int64)
    owner = table.owner[lines].astype(np.int64)
    owned = owner == unit
    length = stop - start
    computed = np.concatenate(sequences) if sequences else np.empty(0, np.int64)
    order = np.concatenate([computed, np.flatnonzero(~owned)])
    offsets = np.concatenate([[0], np.cumsum(length[order])])
    span_row = np.empty(len(start), np.int64)
    span_row[order] = offsets[:-1]
    bounds = np.concatenate([[0], np.cumsum([length[s].sum() for s in sequences])]).astype(np.int64)
    tokens = [
        tree.tokens(int(r), int(a), int(b))
        for r, a, b in zip(table.row[lines][order], start[order], stop[order], strict=True)
    ]
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - start[order], length[order])
    imported = np.repeat(order, length[order])[bounds[-1] :]
    return UnitRows(
        num_rows=int(bounds[-1]),
        span_parent=table.parent[lines].astype(np.int64),
        span_start=start,
        span_stop=stop,
        span_row=span_row,
        owned=owned,
        sequence_spans=sequences,
        sequence_rows=tuple(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)),
        tokens=np.concatenate([np.empty(0, np.int64), *tokens]).astype(np.int64),
        positions=positions,
        import_unit=owner[imported],
        import_span=table.owner_span[lines].astype(np.int64)[imported],
    )


def conv_ancestors(rows: UnitRows) -> Int64:
    """int64 [C, CONV_WIDTH − 1], rows of each own token's nearest ancestors, the farthest first; −1: none."""
    width = CONV_WIDTH - 1
    result = np.arange(rows.num_rows)[:, None] + np.arange(-width, 0)
    for spans, (start, stop) in zip(rows.sequence_spans, rows.sequence_rows, strict=True):
        before = rows.last_ancestors(int(spans[0]), width)
        path = np.concatenate(
            [np.full(width - len(before), -1), before, np.arange(start, min(stop, start + width))]
        )
        for i in range(min(width, stop - start)):
            result[start + i] = path[i : i + width]
    return result


def join_imports(index: Int64, num_rows: int) -> tuple[Int64, Int64]:
    """Renumber a table's imported rows to those that it reaches.

    Args:
        index: int64, rows over [own | all imported]; negative values stay.
        num_rows: C.

    Returns:
        The index over [own | reached], and int64 the reached imported tokens in increasing order.
    """
    imported = index >= num_rows
    reached, inverse = np.unique(index[imported] - num_rows, return_inverse=True)
    result = index.copy()
    result[imported] = num_rows + inverse
    return result, reached


def spans_of_sequences(sequences: Ragged, lines: slice) -> tuple[Int64, ...]:
    """The span lists of some lines of the sequences table."""
    return tuple(sequences[i].astype(np.int64) for i in range(lines.start, lines.stop))
