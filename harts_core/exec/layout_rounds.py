"""Rounds of a unit: packed linear-attention calls, replayed rows, and states handed from call to call."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts_core.errors import InvalidPlanError
from harts_core.exec.config import LinearCalls
from harts_core.exec.kda import KdaCall
from harts_core.exec.layout_rows import UnitRows, spans_of_sequences
from harts_core.plan.bundle import NONE, PlanBundle

Int64 = npt.NDArray[np.int64]
StateKey = tuple[int, int, int]
"""(unit, span, position): the state after ``position`` tokens, computed with that span."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequencePlan:
    """The sequences of a unit in memory order.

    Attributes:
        spans: span indices of each sequence.
        round: int64 [sequences], not decreasing.
        entry: int64 [sequences], the position at which the sequence's state update starts.
        source: the state that it starts from; None: zeros.
        requested: states of this unit that some sequence of the plan starts from.
        finals: whether ``requested`` are states at the end of their span's sequence (no replay) instead of
            states at chunk boundaries.
    """

    spans: tuple[Int64, ...]
    round: Int64
    entry: Int64
    source: tuple[StateKey | None, ...]
    requested: tuple[StateKey, ...]
    finals: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """The packed calls of a unit.

    Attributes:
        calls: one per round.
        initial_states: int64 [N] per round, state slots; −1: zeros.
        packed_rows: int64 [P], rows of all packed tokens, over [own | all imported].
        packed_own: int64 [C], where the own rows are among them.
        state_slots: slot of each returned state.
        imported_states: keys of the slots behind the returned ones.
    """

    calls: tuple[KdaCall, ...]
    initial_states: tuple[Int64, ...]
    packed_rows: Int64
    packed_own: Int64
    state_slots: dict[StateKey, int]
    imported_states: tuple[StateKey, ...]


def sequence_plan(bundle: PlanBundle, unit: int) -> SequencePlan:
    """The plan's sequences of a unit, and which of its states any unit starts from."""
    table = bundle.sequences
    lines = slice(int(bundle.sequence_offsets[unit]), int(bundle.sequence_offsets[unit + 1]))
    columns = (table.state_unit, table.state_span, table.state_position)
    keys = np.stack([c[lines] for c in columns], axis=1)
    wanted = np.stack([c[table.state_unit == unit] for c in columns], axis=1)
    return SequencePlan(
        spans=spans_of_sequences(table.spans, lines),
        round=table.round[lines].astype(np.int64),
        entry=table.replay_start[lines].astype(np.int64),
        source=tuple(None if k[0] == NONE else _key(k) for k in keys),
        requested=tuple(sorted({_key(k) for k in wanted})),
        finals=False,
    )


def span_plan(bundle: PlanBundle, unit: int, calls: LinearCalls) -> SequencePlan:
    """Every span a sequence of its own: the comparisons with the plan's packed rounds.

    ``levels`` and ``nodes`` enter a span at the chunk boundary before it and replay, as the plan's sequences
    do, but the first child of a fork too; ``no-replay`` enters at its parent's last state. Spans of one depth
    share a call; ``nodes`` gives each span its own. Only for units without imports.
    """
    lines = slice(bundle.span_offsets[unit], bundle.span_offsets[unit + 1])
    parent = bundle.spans.parent[lines].astype(np.int64)
    start, stop = (c[lines].astype(np.int64) for c in (bundle.spans.start, bundle.spans.stop))
    finals = calls == "no-replay"
    entry = start if finals else start // bundle.chunk * bundle.chunk
    depth = np.zeros(len(parent), np.int64)
    source: list[StateKey | None] = []
    for s, p in enumerate(parent.tolist()):  # parents come first
        depth[s] = 0 if p == NONE else depth[p] + 1
        if entry[s] == 0:
            source.append(None)
        elif finals:
            source.append((unit, p, int(stop[p])))
        elif entry[p] < entry[s]:
            source.append((unit, p, int(entry[s])))
        else:  # no boundary inside the parent: it enters where this span does
            source.append(source[p])
    order = np.argsort(depth, kind="stable")
    return SequencePlan(
        spans=tuple(np.array([s]) for s in order),
        round=np.arange(len(order)) if calls == "nodes" else depth[order],
        entry=entry[order],
        source=tuple(source[s] for s in order),
        requested=tuple(sorted({key for key in source if key is not None})),
        finals=finals,
    )


def build_rounds(bundle: PlanBundle, unit: int, plan: SequencePlan, rows: UnitRows) -> Rounds:
    """Pack the sequences of each round and number the states.

    Raises:
        InvalidPlanError: a sequence starts from a state that no earlier round of the unit returns.
    """
    bounds = np.searchsorted(plan.round, np.unique(plan.round), side="left").tolist()
    bounds.append(len(plan.spans))
    sequence_of = {int(s): i for i, spans in enumerate(plan.spans) for s in spans}
    wanted: list[list[StateKey]] = [[] for _ in plan.spans]
    for key in plan.requested:
        wanted[sequence_of[key[1]]].append(key)
    imported = tuple(sorted({k for k in plan.source if k is not None and k[0] != unit}))
    produced = len({(sequence_of[k[1]], k[2]) for k in plan.requested})
    import_slots = {k: produced + i for i, k in enumerate(imported)}
    slots: dict[StateKey, int] = {}
    num_slots = 0
    pieces: list[Int64] = [np.empty(0, np.int64)]
    calls: list[KdaCall] = []
    initial: list[Int64] = []
    for first, last in itertools.pairwise(bounds):
        ready = slots | import_slots
        start = [_slot(unit, plan.source[i], ready) for i in range(first, last)]
        lengths: list[int] = []
        returned: list[tuple[int, int]] = []
        for i in range(first, last):
            packed = _packed_rows(plan, rows, i)
            pieces.append(packed)
            lengths.append(len(packed))
            for position in sorted({k[2] for k in wanted[i]}):
                slots |= {k: num_slots + len(returned) for k in wanted[i] if k[2] == position}
                returned.append((i - first, int(position - plan.entry[i])))
        num_slots += len(returned)
        calls.append(_call(tuple(lengths), bundle.chunk, returned, plan.finals))
        initial.append(np.array(start, np.int64))
    packed_rows = np.concatenate(pieces)
    replayed = _replay_lengths(plan, rows)
    own = np.arange(rows.num_rows) + np.repeat(
        np.cumsum(replayed), [stop - start for start, stop in rows.sequence_rows]
    )
    return Rounds(
        calls=tuple(calls),
        initial_states=tuple(initial),
        packed_rows=packed_rows,
        packed_own=own.astype(np.int64),
        state_slots=slots,
        imported_states=imported,
    )


def _key(values: npt.NDArray[np.int32]) -> StateKey:
    return int(values[0]), int(values[1]), int(values[2])


def _slot(unit: int, source: StateKey | None, slots: dict[StateKey, int]) -> int:
    if source is None:
        return -1
    if source not in slots:
        raise InvalidPlanError(
            f"A sequence starts from the state after {source[2]} tokens, which no earlier round returns.",
            where=f"unit {unit}, span {source[1]}",
        )
    return slots[source]


def _replay_lengths(plan: SequencePlan, rows: UnitRows) -> Int64:
    starts = rows.span_start[[int(spans[0]) for spans in plan.spans]] if plan.spans else np.empty(0, np.int64)
    return np.asarray(starts - plan.entry)


def _packed_rows(plan: SequencePlan, rows: UnitRows, sequence: int) -> Int64:
    """Replayed ancestors, then the own rows."""
    first = int(plan.spans[sequence][0])
    replay = rows.last_ancestors(first, int(rows.span_start[first] - plan.entry[sequence]))
    return np.concatenate([replay, np.arange(*rows.sequence_rows[sequence])])


def _call(lengths: tuple[int, ...], chunk: int, returned: list[tuple[int, int]], finals: bool) -> KdaCall:
    if finals:
        return KdaCall(lengths=lengths, chunk=chunk, finals=tuple(n for n, _ in returned))
    return KdaCall(
        lengths=lengths, chunk=chunk, boundaries=tuple((n, tokens // chunk) for n, tokens in returned)
    )
