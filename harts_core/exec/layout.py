"""The index arrays that a forward of one unit needs, made once from the plan and shared by all layers.

Row spaces. The unit's own compact tokens are rows [0, C) in memory order: round by round, sequence by
sequence, so that the tokens of a sequence and of a round are contiguous. A table that also reaches imported
tokens continues with rows [C, C + I), where I counts the imported tokens that this table needs (few for the
convolution and the replay, all ancestors for the attention keys).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harts_core.errors import ExecError
from harts_core.exec.config import LinearCalls
from harts_core.exec.kda import KdaCall
from harts_core.exec.layout_head import HeadLayout, build_head_layout
from harts_core.exec.layout_rounds import StateKey, build_rounds, sequence_plan, span_plan
from harts_core.exec.layout_rows import UnitRows, build_unit_rows, conv_ancestors, join_imports
from harts_core.plan.bundle import PlanBundle
from harts_core.trees.rollout_tree import RolloutTree

Int64 = npt.NDArray[np.int64]
Run = tuple[int, int]
"""Half-open range of rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundLayout:
    """One packed linear-attention call.

    Attributes:
        call: lengths (replayed and computed tokens of each sequence) and the states to return.
        initial_state: int64 [N], state slot that each sequence starts from; −1: zeros. Slots number the
            states that the rounds return, in order, and then the imported ones.
    """

    call: KdaCall
    initial_state: Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpan:
    """The queries of one sequence and the keys they see: its ancestors' rows, then its own up to the query.

    Attributes:
        start, stop: own rows of the sequence.
        ancestors: runs of rows, in path order from the root, over [own | key imports].
    """

    start: int
    stop: int
    ancestors: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedRows:
    """Which tokens of other units each table reaches beyond the own rows.

    Attributes:
        unit, span, position: int64 [I_all], every imported token: its owner, the span there that holds it,
            and its position.
        conv, replay, keys, hidden: int64, indices into these, in the order of the table's rows from C on:
            convolution inputs, replay inputs, attention keys and values, final hidden states.
        states: boundary states of other units, (unit, span, position) each.
    """

    unit: Int64
    span: Int64
    position: Int64
    conv: Int64
    replay: Int64
    keys: Int64
    hidden: Int64
    states: tuple[StateKey, ...]

    @property
    def is_needed(self) -> bool:
        """Whether a layer reads anything of another unit (the head has its own imports)."""
        return bool(len(self.conv) or len(self.replay) or len(self.keys) or self.states)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitLayout:
    """Everything a forward of one unit needs besides the weights.

    Attributes:
        unit: its id in the bundle.
        num_rows: C, compact tokens that it computes.
        tokens, positions: int64 [C], token ids and positions in the trajectory.
        occurrences: int64 [C], q_c: semantic positions of the step at each own token, whichever unit
            evaluates them; over all units of a plan they sum to the original tokens.
        conv_ancestors: int64 [C, 3], rows of the nearest three ancestors, the farthest first, over
            [own | conv imports | zero row].
        packed_rows: int64 [P], rows of all rounds' packed tokens one after the other, replay included, over
            [own | replay imports].
        packed_own: int64 [C], where the own rows are among the P packed ones.
        rounds: the packed calls in order.
        state_slots: slot of each boundary state that the rounds return, by (unit, span, position).
        attention: one entry per sequence, in row order.
        head: rows and labels of the log-probabilities, over [own | hidden imports].
        imported: what it needs from other units.
        span_row: int64 [spans of the unit], first own row of each span; −1 where it is imported.
        span_start: int64, first position of each span.
    """

    unit: int
    num_rows: int
    tokens: Int64
    positions: Int64
    occurrences: Int64
    conv_ancestors: Int64
    packed_rows: Int64
    packed_own: Int64
    rounds: tuple[RoundLayout, ...]
    state_slots: dict[StateKey, int]
    attention: tuple[AttentionSpan, ...]
    head: HeadLayout
    imported: ImportedRows
    span_row: Int64
    span_start: Int64
    _devices: dict[torch.device, DeviceLayout] = field(default_factory=dict, repr=False)

    @property
    def trained_row(self) -> Int64:
        """int64, the tree row of each log-probability of the unit, ordered by (row, position)."""
        return self.head.trained_row

    @property
    def trained_index(self) -> Int64:
        """int64, which of its row's trained positions each log-probability belongs to."""
        return self.head.trained_index

    def row_of(self, span: int, position: int) -> int:
        """The own row of a token.

        Raises:
            KeyError: the unit does not compute that span.
        """
        if self.span_row[span] < 0:
            raise KeyError(span)
        return int(self.span_row[span] + position - self.span_start[span])

    def to(self, device: torch.device | str) -> DeviceLayout:
        """The index arrays as tensors on a device; made once per device."""
        device = torch.device(device)
        if device not in self._devices:
            self._devices[device] = DeviceLayout.build(self, device)
        return self._devices[device]

    def forget_devices(self) -> None:
        """Drop the device copies, which point back here: without that cycle a layout is freed at once."""
        self._devices.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InitialState:
    """How a round's initial states are gathered: (piece … piece, zeros) permuted by ``order``.

    Attributes:
        pieces: (source, int64 index): a round, or −1 for the imported states, and which of its states.
        num_zeros: zero states behind the pieces.
        order: int64 [N].
    """

    pieces: tuple[tuple[int, Tensor], ...]
    num_zeros: int
    order: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceLayout:
    """A unit's index arrays as int64 tensors; ``layout`` is the original.

    ``initial_states`` has one entry per round, None where every sequence starts from zeros.
    """

    layout: UnitLayout
    device: torch.device
    tokens: Tensor
    positions: Tensor
    conv_ancestors: tuple[Tensor, ...]
    packed_rows: Tensor
    packed_own: Tensor
    initial_states: tuple[InitialState | None, ...]
    head_rows: Tensor
    head_labels: Tensor
    head_label_row: Tensor
    trained_label: Tensor

    @classmethod
    def build(cls, layout: UnitLayout, device: torch.device) -> DeviceLayout:
        """The arrays on the device; on the CPU they share the layout's memory."""

        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.as_tensor(np.ascontiguousarray(array, np.int64), device=device)

        head = layout.head
        return cls(
            layout=layout,
            device=device,
            tokens=tensor(layout.tokens),
            positions=tensor(layout.positions),
            conv_ancestors=tuple(tensor(column) for column in layout.conv_ancestors.T),
            packed_rows=tensor(layout.packed_rows),
            packed_own=tensor(layout.packed_own),
            initial_states=_initial_states(layout, device),
            head_rows=tensor(head.rows),
            head_labels=tensor(head.labels),
            head_label_row=tensor(np.repeat(np.arange(len(head.rows)), np.diff(head.label_offsets))),
            trained_label=tensor(head.trained_label),
        )

    @property
    def trained_row(self) -> Int64:
        """See ``UnitLayout.trained_row``."""
        return self.layout.head.trained_row

    @property
    def trained_index(self) -> Int64:
        """See ``UnitLayout.trained_index``."""
        return self.layout.head.trained_index

    def to(self, device: torch.device | str) -> DeviceLayout:
        """The same unit's layout on a device."""
        return self.layout.to(device)


def _initial_states(layout: UnitLayout, device: torch.device) -> tuple[InitialState | None, ...]:
    """Split every round's state slots by the round that returned them."""
    ends = np.cumsum([entry.call.num_states for entry in layout.rounds])
    result: list[InitialState | None] = []
    for entry in layout.rounds:
        slots = entry.initial_state
        if np.all(slots < 0):
            result.append(None)
            continue
        source = np.where(slots < 0, len(ends) + 1, np.searchsorted(ends, slots, side="right"))
        order = np.argsort(source, kind="stable")
        pieces = []
        for i in np.unique(source[slots >= 0]).tolist():
            first = ends[i - 1] if i else 0
            index = torch.tensor(slots[source == i] - first, device=device)
            pieces.append((i if i < len(ends) else -1, index))
        result.append(
            InitialState(
                pieces=tuple(pieces),
                num_zeros=int(np.sum(slots < 0)),
                order=torch.tensor(np.argsort(order), device=device),
            )
        )
    return tuple(result)


def build_unit_layout(
    bundle: PlanBundle, tree: RolloutTree, unit: int, *, linear_calls: LinearCalls = "rounds"
) -> UnitLayout:
    """The layout of one unit, straight from the plan's tables.

    Args:
        bundle: a validated plan.
        tree: the rollout tree it was made for.
        unit: unit id.
        linear_calls: the plan's ``rounds``; or, to compare with, every span a sequence of its own: ``levels``
            (one call per depth), ``nodes`` (one call per span), or ``no-replay``, which starts a span from
            its parent's final state, with a chunk grid that begins at the fork: the same function
            mathematically, numerically another path. The comparisons take only units without imports.

    Raises:
        ExecError: a comparison was asked of a unit with imports.
    """
    if linear_calls == "rounds":
        plan = sequence_plan(bundle, unit)
    else:
        owners = bundle.spans.owner[bundle.span_offsets[unit] : bundle.span_offsets[unit + 1]]
        if np.any(owners != unit):
            raise ExecError(
                f"Linear attention in {linear_calls} runs only on units without imports.",
                where=f"unit {unit}",
                hint="plan without sharing across microbatches (--planner harts-l1)",
            )
        plan = span_plan(bundle, unit, linear_calls)
    rows = build_unit_rows(bundle, tree, unit, plan.spans)
    rounds = build_rounds(bundle, unit, plan, rows)
    conv, conv_imports = join_imports(conv_ancestors(rows), rows.num_rows)
    packed, replay_imports = join_imports(rounds.packed_rows, rows.num_rows)
    head = build_head_layout(bundle, tree, unit, rows)
    head_rows, hidden_imports = join_imports(head.rows, rows.num_rows)
    attention, key_imports = _attention_spans(rows)
    zero_row = rows.num_rows + len(conv_imports)
    return UnitLayout(
        unit=unit,
        num_rows=rows.num_rows,
        tokens=rows.tokens[: rows.num_rows],
        positions=rows.positions[: rows.num_rows],
        occurrences=head.occurrences[: rows.num_rows],
        conv_ancestors=np.asfortranarray(np.where(conv < 0, zero_row, conv)),
        packed_rows=packed,
        packed_own=rounds.packed_own,
        rounds=tuple(
            RoundLayout(call=call, initial_state=initial)
            for call, initial in zip(rounds.calls, rounds.initial_states, strict=True)
        ),
        state_slots=rounds.state_slots,
        attention=attention,
        head=head.with_rows(head_rows),
        imported=ImportedRows(
            unit=rows.import_unit,
            span=rows.import_span,
            position=rows.positions[rows.num_rows :],
            conv=conv_imports,
            replay=replay_imports,
            keys=key_imports,
            hidden=hidden_imports,
            states=rounds.imported_states,
        ),
        span_row=np.where(rows.owned, rows.span_row, -1),
        span_start=rows.span_start,
    )


def _attention_spans(rows: UnitRows) -> tuple[tuple[AttentionSpan, ...], Int64]:
    """One entry per sequence, and the imported tokens whose keys are read."""
    runs = [rows.ancestor_runs(int(spans[0])) for spans in rows.sequence_spans]
    readers = np.zeros(len(rows.tokens) + 1, np.int64)  # differences of the number of reading runs
    for start, stop in {run for path in runs for run in path}:
        readers[start] += 1
        readers[stop] -= 1
    imports = np.flatnonzero(np.cumsum(readers)[rows.num_rows :])

    def move(run: Run) -> Run:
        if run[0] < rows.num_rows:
            return run
        start = rows.num_rows + int(np.searchsorted(imports, run[0] - rows.num_rows))
        return start, start + run[1] - run[0]

    spans = tuple(
        AttentionSpan(start=start, stop=stop, ancestors=tuple(move(run) for run in path))
        for (start, stop), path in zip(rows.sequence_rows, runs, strict=True)
    )
    return spans, imports
