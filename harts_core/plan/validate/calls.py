"""Rules of the call plan: sequences compute the owned spans once each, from states that are ready."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from harts_core.plan.bundle import NONE, PlanBundle
from harts_core.plan.validate.failure import require


def check_calls(bundle: PlanBundle) -> None:
    """Numbering, paths, the partition of the owned spans, replay starts and state sources."""
    q, s = bundle.sequences, bundle.spans

    def where(i: int) -> str:
        return f"unit {q.unit[i]}, round {q.round[i]}, sequence {q.index[i]}"

    require((q.unit >= 0) & (q.unit < bundle.num_units), "no such unit", lambda i: f"sequences, line {i}")
    _check_numbering(bundle)
    require(q.spans.lengths > 0, "the sequence has no spans", where)
    of_span = np.repeat(np.arange(len(q)), q.spans.lengths)  # the sequence of each listed span
    unit, span = q.unit[of_span], q.spans.values

    def where_span(i: int) -> str:
        return f"{where(int(of_span[i]))}, span {span[i]}"

    counts = np.diff(bundle.span_offsets)
    require((span >= 0) & (span < counts[unit]), "the unit has no such span", where_span)
    line = bundle.span_offsets[unit] + span
    require(s.owner[line] == unit, "the span is imported, not computed here", where_span)
    inner = np.flatnonzero(of_span[1:] == of_span[:-1]) + 1
    require(
        s.parent[line[inner]] == span[inner - 1],
        "the span is not a child of the one before it",
        lambda i: where_span(int(inner[i])),
    )
    uses = np.bincount(line, minlength=len(s))
    require(
        uses == (s.owner == s.unit),
        "an owned span is not computed by exactly one sequence",
        lambda i: f"unit {s.unit[i]}, span {s.span[i]}",
    )
    _check_states(bundle, line[q.spans.offsets[:-1]], line, of_span)


def _check_numbering(bundle: PlanBundle) -> None:
    """Sorted by (unit, round, index); rounds and indices count from 0 without gaps."""
    q = bundle.sequences
    unit, rnd, index = (x.astype(np.int64) for x in (q.unit, q.round, q.index))
    same_unit = np.zeros(len(q), np.bool_)
    same_unit[1:] = unit[1:] == unit[:-1]
    same_round = same_unit.copy()
    same_round[1:] &= rnd[1:] == rnd[:-1]
    previous = np.maximum(np.arange(len(q)) - 1, 0)
    next_round = same_unit & (rnd == rnd[previous] + 1)
    ok = np.where(same_round, index == index[previous] + 1, index == 0)
    ok &= same_round | next_round | (~same_unit & (rnd == 0))
    ok[1:] &= same_unit[1:] | (unit[1:] > unit[:-1])
    require(
        ok,
        "rounds and indices do not count 0, 1, … in order",
        lambda i: f"sequences, line {i}: unit {q.unit[i]}, round {q.round[i]}, index {q.index[i]}",
    )


def _check_states(
    bundle: PlanBundle, head: npt.NDArray[Any], line: npt.NDArray[Any], of_span: npt.NDArray[Any]
) -> None:
    """The state at a(start): zero at 0, else from the ancestor that holds the position before it."""
    q, s, chunk = bundle.sequences, bundle.spans, bundle.chunk

    def where(i: int) -> str:
        return f"unit {q.unit[i]}, round {q.round[i]}, sequence {q.index[i]}"

    start = s.start[head]
    require(
        (q.replay_start % chunk == 0) & (q.replay_start <= start) & (start - q.replay_start < chunk),
        f"replay_start is not the chunk boundary (of {chunk}) at or before the sequence's start",
        where,
    )
    zero = q.replay_start == 0
    require(
        ~zero | ((q.state_unit == NONE) & (q.state_span == NONE) & (q.state_position == NONE)),
        "a sequence that starts from position 0 names a state",
        where,
    )
    require(zero | (q.state_position == q.replay_start), "state_position is not replay_start", where)
    holder = _holders(s.unit, s.parent, s.start, bundle.span_offsets, head, q.replay_start)
    needs = np.flatnonzero(~zero)

    def where_needs(i: int) -> str:
        return where(int(needs[i]))

    source = holder[needs]
    require(
        (q.state_unit[needs] == s.owner[source]) & (q.state_span[needs] == s.owner_span[source]),
        "the state is not that of the owned span which holds the position before replay_start",
        where_needs,
    )
    round_of_line = np.full(len(s), -1, np.int64)
    round_of_line[line] = q.round[of_span]
    own = s.owner[source] == q.unit[needs]
    require(
        ~own | (round_of_line[source] < q.round[needs]),
        "the state is not made by an earlier round",
        where_needs,
    )


@numba.njit(cache=True)
def _holders(unit: Any, parent: Any, start: Any, offset: Any, head: Any, position: Any) -> Any:
    """For each sequence the ancestor line of its head that holds token ``position`` − 1; −1: none."""
    result = np.full(len(head), -1, np.int64)
    for i in range(len(head)):
        line = head[i]
        while line >= 0 and start[line] >= position[i]:
            line = offset[unit[line]] + parent[line] if parent[line] >= 0 else -1
        result[i] = line
    return result
