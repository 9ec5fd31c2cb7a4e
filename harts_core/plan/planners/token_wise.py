"""Token-wise microbatches: each worker's prefix tree, in depth-first order, cut at any token.

A worker (replica) computes every distinct prefix of its rows once, in one consumer. Its tokens, in
depth-first order, are cut into runs of equal work; run j is the consumer of slot j. It owns the tokens of its
run, evaluates every trajectory at them, and imports their ancestors from the consumers before it. All
ancestors that it does not own lie on the path to the run's first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import CONSUMER, NONE, AssignmentTable, SpanTable, WindowTable
from harts_core.plan.layout import TOKEN_WISE, Layout
from harts_core.plan.planners.problem import Int64, PlanProblem
from harts_core.plan.planners.worker_tokens import WorkerTokens, count_microbatches, cut_tokens


def layout_token_wise(problem: PlanProblem, worker: npt.NDArray[Any]) -> Layout:
    """The layout (sharing "tree", no producers) of chains of consumers, one on every worker.

    All workers have as many microbatches (``count_microbatches``), cut by ``cut_tokens``.

    Args:
        problem: the problem; rows may be longer than the capacity.
        worker: int [M], the worker of each row; none without a row.

    Raises:
        InfeasiblePlanError: a worker has fewer tokens than another one needs microbatches.
    """
    workers = [WorkerTokens.of_rows(problem, np.flatnonzero(worker == d)) for d in range(problem.dp)]
    count = count_microbatches(workers, problem.capacity)
    chains = [_chain(w, cut_tokens(w, count=count, capacity=problem.capacity)) for w in workers]
    return _layout(chains, count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pieces:
    """A worker's segments cut at the cuts, in depth-first order; microbatches are runs of pieces.

    Attributes:
        begins: int64 [P], tokens of the worker before each piece.
        unit: int64 [P], its microbatch.
        parent: int64 [P], NONE at a root.
        level: int64 [P], how many ancestors it has.
        start, stop: int64 [P], token positions.
        row: int64 [P], a row of the tree that passes through it.
        opening: int64 [units], the first piece of each microbatch.
        place: int64 [P], the piece's span in its microbatch: behind the ancestors of the first piece.
    """

    begins: Int64
    unit: Int64
    parent: Int64
    level: Int64
    start: Int64
    stop: Int64
    row: Int64
    opening: Int64
    place: Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chain:
    """One worker's consumers: columns of the span and the assignment table, with microbatches as units."""

    spans: dict[str, npt.NDArray[Any]]
    lines: dict[str, npt.NDArray[Any]]


def _chain(worker: WorkerTokens, cuts: Int64) -> _Chain:
    pieces = _cut_segments(worker, cuts)
    return _Chain(spans=_spans(pieces), lines=_lines(worker, pieces))


def _cut_segments(worker: WorkerTokens, cuts: Int64) -> _Pieces:
    tree, first = worker.tree, worker.first
    begins = np.union1d(first[:-1], cuts[:-1])
    segment = np.searchsorted(first, begins, side="right") - 1
    start = tree.start[segment] + begins - first[segment]
    last_of_segment = np.searchsorted(begins, first[1:]) - 1
    above = tree.parent[segment]
    before = np.where(above < 0, NONE, last_of_segment[above])
    parent = np.where(begins == first[segment], before, np.arange(len(begins)) - 1)
    unit = np.searchsorted(cuts, begins, side="right") - 1
    opening = np.searchsorted(begins, cuts[:-1])
    level = _levels(parent)
    return _Pieces(
        begins=begins,
        unit=unit,
        parent=parent,
        level=level,
        start=start,
        stop=start + np.diff(np.append(begins, worker.num_tokens)),
        row=worker.rows[tree.row[segment]].astype(np.int64),
        opening=opening,
        place=np.arange(len(begins)) - opening[unit] + level[opening][unit],
    )


def _spans(pieces: _Pieces) -> dict[str, npt.NDArray[Any]]:
    """Each microbatch's spans: the ancestors of its first piece, imported, then its own pieces.

    An ancestor is the span at its level. (A piece of the run with a parent before the run continues the path
    of the first piece: in depth-first order all that lies between a piece and its descendant is below it.)
    """
    count = len(pieces.opening)
    ends = np.append(pieces.opening[1:], len(pieces.begins))
    depth = pieces.level[pieces.opening]
    sizes = depth + ends - pieces.opening
    unit = np.repeat(np.arange(count), sizes)
    listed = _with_ancestors(pieces.parent, pieces.opening, ends, depth)
    parent = pieces.parent[listed]
    own = parent >= pieces.opening[unit]
    return {
        "unit": unit,
        "span": np.arange(len(listed)) - np.repeat(np.cumsum(sizes) - sizes, sizes),
        "parent": np.where(parent == NONE, NONE, np.where(own, pieces.place[parent], pieces.level[parent])),
        "start": pieces.start[listed],
        "stop": pieces.stop[listed],
        "row": pieces.row[listed],
        "owner": pieces.unit[listed],
        "owner_span": pieces.place[listed],
    }


def _lines(worker: WorkerTokens, pieces: _Pieces) -> dict[str, npt.NDArray[Any]]:
    """Every row is evaluated in each microbatch that owns some of its tokens."""
    segment = worker.tree.row_segment
    last = worker.first[segment] + worker.length - 1 - worker.tree.start[segment]
    ending = np.searchsorted(pieces.begins, last, side="right") - 1
    number, piece, start = _walk(ending, pieces.parent, pieces.unit, pieces.start)
    return {
        "row": worker.rows[number],
        "unit": pieces.unit[piece],
        "start": start,
        "stop": np.minimum(pieces.stop[piece], worker.length[number]),
        "span": pieces.place[piece],
    }


@numba.njit(cache=True)
def _levels(parent: Any) -> Any:
    level = np.zeros(len(parent), np.int64)
    for p in range(len(parent)):
        if parent[p] >= 0:
            level[p] = level[parent[p]] + 1
    return level


@numba.njit(cache=True)
def _with_ancestors(parent: Any, opening: Any, ends: Any, depth: Any) -> Any:
    """Run by run, the ancestors of its first piece from the root and then its pieces."""
    listed = np.empty((depth + ends - opening).sum(), np.int64)
    at = 0
    for u in range(len(opening)):
        piece = opening[u]
        for k in range(depth[u] - 1, -1, -1):
            piece = parent[piece]
            listed[at + k] = piece
        at += depth[u]
        for piece in range(opening[u], ends[u]):
            listed[at] = piece
            at += 1
    return listed


@numba.njit(cache=True)
def _walk(ending: Any, parent: Any, unit: Any, start: Any) -> Any:
    """(row, its last piece there, first position) for every row and microbatch that its path crosses."""
    rows, pieces, starts = [np.int64(0)][:0], [np.int64(0)][:0], [np.int64(0)][:0]
    for i in range(len(ending)):
        piece = np.int64(ending[i])
        while piece >= 0:
            top = piece
            while parent[top] >= 0 and unit[parent[top]] == unit[piece]:
                top = np.int64(parent[top])
            rows.append(np.int64(i))
            pieces.append(piece)
            starts.append(np.int64(start[top]))
            piece = np.int64(parent[top])
    return np.array(rows), np.array(pieces), np.array(starts)


def _layout(chains: list[_Chain], count: int) -> Layout:
    """Number the units slot by slot, and sort the tables."""
    dp = len(chains)
    replica = np.tile(np.arange(dp, dtype=np.int32), count)
    slot = np.repeat(np.arange(count, dtype=np.int32), dp)

    def column(kind: str, name: str) -> Int64:
        parts = [getattr(chain, kind)[name] for chain in chains]
        if name in ("unit", "owner"):
            parts = [part * dp + d for d, part in enumerate(parts)]
        return np.concatenate(parts)

    spans = {name: column("spans", name) for name in SpanTable.__slots__}
    order = np.argsort(spans["unit"], kind="stable")
    lines = {name: column("lines", name) for name in chains[0].lines}
    by_row = np.lexsort((lines["start"], lines["row"]))
    unit = lines["unit"][by_row]
    return Layout(
        replica=replica,
        kind=np.full(len(slot), CONSUMER, np.int32),
        window=np.full(len(slot), NONE, np.int32),
        slot=slot,
        order=slot.copy(),
        windows=WindowTable(slot_start=np.empty(0, np.int32), slot_stop=np.empty(0, np.int32)),
        spans=SpanTable(**{name: values[order].astype(np.int32) for name, values in spans.items()}),
        assignments=AssignmentTable(
            **{name: values[by_row].astype(np.int32) for name, values in lines.items()},
            replica=replica[unit],
            slot=slot[unit],
        ),
        sharing="tree",
        parameters={TOKEN_WISE: 0},
    )
