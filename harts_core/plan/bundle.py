"""The plan bundle: the whole contract between planning and execution, as five tables and a manifest.

In memory absent values are :data:`NONE`; on disk they are nulls. Reading and writing the directory is
:mod:`harts_core.plan.bundle_file`'s work, the rules are checked by :mod:`harts_core.plan.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from harts_core.trees.ragged import Ragged, read_only

NONE = -1
"""In-memory mark of an absent index (null on disk)."""

PRODUCER = 0
CONSUMER = 1
KINDS = ("producer", "consumer")

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


class _Table:
    """Equal-length read-only columns; dtypes are given by ``DTYPES``."""

    __slots__ = ()
    DTYPES: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        sizes = set()
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if not isinstance(value, Ragged):
                value = read_only(np.asarray(value, self.DTYPES.get(f.name, np.int32)))
                object.__setattr__(self, f.name, value)
            sizes.add(len(value))
        if len(sizes) > 1:
            raise ValueError(f"{type(self).__name__}: columns of different lengths")

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitTable(_Table):
    """One line per execution; a unit's id is its index.

    Attributes:
        replica: int32, data-parallel replica that runs it.
        kind: int32, PRODUCER or CONSUMER.
        window: int32 or NONE.
        slot: int32 or NONE (producers).
        order: int32, forward order on the replica, from 0.
        complete_tokens: int64, compact tokens of the complete layout (all spans).
        computed_tokens: int64, tokens of the owned spans.
        padded_tokens: int64, computed tokens rounded up to the padding multiple.
        cost_forward, cost_backward: float64, cost-model units.
    """

    replica: Int32
    kind: Int32
    window: Int32
    slot: Int32
    order: Int32
    complete_tokens: Int64
    computed_tokens: Int64
    padded_tokens: Int64
    cost_forward: Float64
    cost_backward: Float64
    DTYPES: ClassVar[dict[str, Any]] = {
        "complete_tokens": np.int64,
        "computed_tokens": np.int64,
        "padded_tokens": np.int64,
        "cost_forward": np.float64,
        "cost_backward": np.float64,
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowTable(_Table):
    """Runs of slots [slot_start, slot_stop) that share one producer per replica; the id is the index."""

    slot_start: Int32
    slot_stop: Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanTable(_Table):
    """Token runs cut at their forks, sorted by (unit, span); parents before children.

    Attributes:
        unit, span: int32, the unit and the span's index in it (0, 1, …).
        parent: int32, span index in the same unit, or NONE at a root; start = the parent's stop.
        start, stop: int32, token positions [start, stop), never empty.
        row: int32, a row of the tree file that passes through the whole span.
        owner: int32, the unit that computes it; owner ≠ unit: imported.
        owner_span: int32, the span of the owner that contains it; itself when owned.
    """

    unit: Int32
    span: Int32
    parent: Int32
    start: Int32
    stop: Int32
    row: Int32
    owner: Int32
    owner_span: Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AssignmentTable(_Table):
    """Positions [start, stop) of trajectory ``row`` are evaluated in ``unit``; sorted by (row, start).

    ``span`` (index in the unit) holds position stop − 1. One line per trajectory unless it is split.
    """

    row: Int32
    replica: Int32
    slot: Int32
    unit: Int32
    start: Int32
    stop: Int32
    span: Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceTable(_Table):
    """The linear-attention call plan, sorted by (unit, round, index): also the memory order of the tokens.

    A sequence computes ``spans`` (a parent-to-child path of owned spans of the unit, contiguous in token
    positions). It enters at ``replay_start`` = a(start of its first span), from the boundary state after
    that many tokens, replays the state update over [replay_start, start) along the span's ancestors, then
    computes its spans. The state is zero when ``replay_start`` is 0 (the three state columns are NONE);
    otherwise ``state_position`` = replay_start and (``state_unit``, ``state_span``) is the owned span that
    holds position replay_start − 1: the sequence that computes that span produces the state. A state of the
    same unit comes from an earlier round.
    """

    unit: Int32
    round: Int32
    index: Int32
    spans: Ragged
    replay_start: Int32
    state_unit: Int32
    state_span: Int32
    state_position: Int32


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanBundle:
    """A complete plan. Any planner that can state its plan in these tables can be executed.

    Attributes:
        planner: its registered name.
        parameters: dp, capacity, pad, chunk, seed, sharing ("tree" | "none" | "group"), … (JSON-able).
        cost_model: name and coefficients (JSON-able).
        tree_sha256: content_sha256 of the rollout tree it was made for.
        metrics: DESIGN §3's metrics (JSON-able numbers).
        runtime: clock times and the like, written to runtime.json, never hashed.
    """

    planner: str
    parameters: dict[str, Any]
    cost_model: dict[str, Any]
    tree_sha256: str
    metrics: dict[str, Any]
    units: UnitTable
    windows: WindowTable
    spans: SpanTable
    assignments: AssignmentTable
    sequences: SequenceTable
    runtime: dict[str, Any] = field(default_factory=dict)

    @property
    def num_units(self) -> int:
        """Units of the plan, producers and consumers."""
        return len(self.units)

    @property
    def dp(self) -> int:
        """D, the number of data-parallel replicas."""
        return int(self.parameters["dp"])

    @property
    def chunk(self) -> int:
        """B, the linear-attention chunk length."""
        return int(self.parameters["chunk"])

    @cached_property
    def span_offsets(self) -> Int64:
        """int64 [units + 1], the spans of unit u are lines [span_offsets[u], span_offsets[u + 1])."""
        return np.searchsorted(self.spans.unit, np.arange(self.num_units + 1))

    @cached_property
    def sequence_offsets(self) -> Int64:
        """int64 [units + 1], likewise for the sequences table."""
        return np.searchsorted(self.sequences.unit, np.arange(self.num_units + 1))

    def units_of_replica(self, replica: int) -> Int64:
        """Unit ids of a replica in forward order."""
        mine = np.flatnonzero(self.units.replica == replica)
        return mine[np.argsort(self.units.order[mine], kind="stable")]
