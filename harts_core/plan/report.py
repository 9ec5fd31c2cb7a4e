"""What a plan looks like, read off its tables: slots, replicas, windows, rounds, fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.distribution import Distribution, describe
from harts_core.plan.bundle import CONSUMER, KINDS, NONE, PRODUCER, PlanBundle
from harts_core.plan.layout import TOKEN_WISE
from harts_core.plan.validate.failure import reject, require
from harts_core.plan.validate.units import check_units

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReport:
    """One execution.

    Attributes:
        unit, replica, kind, window, slot, order: as in the units table (None: absent).
        rows: trajectories evaluated in it.
        complete_tokens, computed_tokens, padded_tokens: as in the units table.
        fill: complete_tokens / capacity; of consumers that are cut at tokens, computed_tokens / capacity.
        spans, sequences, rounds: of its layout and its call plan.
        replay_tokens: tokens whose state update is run again.
    """

    unit: int
    replica: int
    kind: str
    window: int | None
    slot: int | None
    order: int
    rows: int
    complete_tokens: int
    computed_tokens: int
    padded_tokens: int
    fill: float
    spans: int
    sequences: int
    rounds: int
    replay_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotReport:
    """The consumers of one slot, which run on all replicas together.

    Attributes:
        slot, rows: the slot and the trajectories evaluated in it.
        complete_tokens, computed_tokens, padded_tokens: summed over the replicas.
        largest_computed: computed tokens of the replica that the others wait for.
        balance: mean over maximum of the replicas' computed tokens (1.0 if nothing is computed).
        fill: mean of its consumers' fill.
        rounds: of the consumer with the most.
    """

    slot: int
    rows: int
    complete_tokens: int
    computed_tokens: int
    padded_tokens: int
    largest_computed: int
    balance: float
    fill: float
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaReport:
    """All units of one replica; costs in the units of the plan's cost model."""

    replica: int
    units: int
    rows: int
    complete_tokens: int
    computed_tokens: int
    padded_tokens: int
    cost_forward: float
    cost_backward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowReport:
    """A run of slots that shares producers; ``producer_tokens``: computed, of all replicas."""

    window: int
    slot_start: int
    slot_stop: int
    producers: int
    producer_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """A plan in numbers.

    Attributes:
        planner, parameters, cost_model, tree_sha256, metrics: as in plan.json.
        validated: whether the plan was checked against its rollout tree for this report.
        slots, replicas, windows, units: tables.
        consumer_fill: fill of the consumers.
        consumer_rows: trajectories of the consumers.
        unit_rounds: packed linear-attention calls of the units.
        round_tokens: new tokens of a call (replayed ones not counted).
    """

    planner: str
    parameters: dict[str, Any]
    cost_model: dict[str, Any]
    tree_sha256: str
    metrics: dict[str, Any]
    validated: bool
    consumer_fill: Distribution
    consumer_rows: Distribution
    unit_rounds: Distribution
    round_tokens: Distribution
    slots: tuple[SlotReport, ...]
    replicas: tuple[ReplicaReport, ...]
    windows: tuple[WindowReport, ...]
    units: tuple[UnitReport, ...]


def plan_report(bundle: PlanBundle, *, validated: bool = False) -> PlanReport:
    """Describe a plan.

    Args:
        bundle: the plan.
        validated: whether the caller has checked it with ``validate_plan``.

    Raises:
        InvalidPlanError: see ``check_references``.
    """
    check_references(bundle)
    units = _unit_reports(bundle)
    consumers = [u for u in units if u.kind == KINDS[CONSUMER]]
    return PlanReport(
        planner=bundle.planner,
        parameters=bundle.parameters,
        cost_model=bundle.cost_model,
        tree_sha256=bundle.tree_sha256,
        metrics=bundle.metrics,
        validated=validated,
        consumer_fill=describe(np.array([u.fill for u in consumers])),
        consumer_rows=describe(np.array([u.rows for u in consumers])),
        unit_rounds=describe(np.array([u.rounds for u in units])),
        round_tokens=describe(tokens_per_round(bundle)),
        slots=_slot_reports(bundle, consumers),
        replicas=_replica_reports(bundle, units),
        windows=_window_reports(bundle),
        units=units,
    )


def tokens_per_round(bundle: PlanBundle) -> Int64:
    """int64 [rounds of all units], new tokens of every packed linear-attention call, by unit and round."""
    sequences = bundle.sequences
    line = _span_lines(bundle)
    tokens = (bundle.spans.stop[line] - bundle.spans.start[line]).astype(np.int64)
    starts = _run_starts(sequences.unit, sequences.round)
    first_span = sequences.spans.offsets[:-1][starts]
    return np.add.reduceat(tokens, first_span) if len(first_span) else tokens


def check_references(bundle: PlanBundle) -> None:
    """Check that the tables refer to things that exist: what can be checked without the rollout tree.

    Raises:
        InvalidPlanError: a unit, slot, window, owner or span that is named does not exist, an owner does
            not run before the unit that imports from it, or a metric is not a number.
    """
    check_units(bundle)
    sequences = bundle.sequences
    for name in ("spans", "sequences", "assignments"):
        unit = getattr(bundle, name).unit
        require((unit >= 0) & (unit < bundle.num_units), "no such unit", _line_of(name))
        if name != "assignments":
            rises = np.append(True, unit[1:] >= unit[:-1])[: len(unit)]
            require(rises, "lines are not sorted by unit", _line_of(name))
    _check_owners(bundle)
    require(sequences.spans.lengths > 0, "the sequence computes no span", _line_of("sequences"))
    count = np.diff(bundle.span_offsets)[np.repeat(sequences.unit, sequences.spans.lengths)]
    require(
        (sequences.spans.values >= 0) & (sequences.spans.values < count),
        "a sequence names a span that its unit does not have",
        lambda i: f"sequences, line {np.searchsorted(sequences.spans.offsets, i, side='right') - 1}",
    )
    for name, value in bundle.metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise reject(f"{name} must be a number, not {value!r}", "plan.json, metrics")


def _check_owners(bundle: PlanBundle) -> None:
    unit, owner = bundle.spans.unit, bundle.spans.owner
    require((owner >= 0) & (owner < bundle.num_units), "no such owner", _line_of("spans"))
    u = bundle.units
    earlier = (u.replica[owner] == u.replica[unit]) & (u.order[owner] < u.order[unit])
    require(
        (owner == unit) | earlier, "the owner does not run before the unit on its replica", _line_of("spans")
    )


def _line_of(table: str) -> Callable[[int], str]:
    return lambda i: f"{table}, line {i}"


def _span_lines(bundle: PlanBundle) -> Int64:
    """int64, the line in the spans table of every entry of ``sequences.spans.values``."""
    unit = np.repeat(bundle.sequences.unit, bundle.sequences.spans.lengths)
    return np.asarray(bundle.span_offsets[unit] + bundle.sequences.spans.values, np.int64)


def _run_starts(*keys: npt.NDArray[Any]) -> Int64:
    """Indices where any of the parallel keys changes, 0 included."""
    if not len(keys[0]):
        return np.empty(0, np.int64)
    changed = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return np.concatenate([[0], np.flatnonzero(changed) + 1])


def _per_unit(
    bundle: PlanBundle, unit: npt.NDArray[Any], weight: npt.NDArray[Any] | None = None
) -> list[int]:
    counts = np.bincount(unit, weight, minlength=bundle.num_units)
    return [int(c) for c in counts]


def _replay_tokens(bundle: PlanBundle) -> list[int]:
    """Per unit: from where a sequence enters to the start of its first span."""
    sequences = bundle.sequences
    first = _span_lines(bundle)[sequences.spans.offsets[:-1]]
    return _per_unit(bundle, sequences.unit, bundle.spans.start[first] - sequences.replay_start)


def _unit_reports(bundle: PlanBundle) -> tuple[UnitReport, ...]:
    units, sequences = bundle.units, bundle.sequences
    rows = _per_unit(bundle, bundle.assignments.unit)
    spans = _per_unit(bundle, bundle.spans.unit)
    calls = _per_unit(bundle, sequences.unit)
    rounds = _per_unit(bundle, sequences.unit[_run_starts(sequences.unit, sequences.round)])
    replay = _replay_tokens(bundle)
    capacity = int(bundle.parameters["capacity"])
    cut = units.slot >= bundle.parameters.get(TOKEN_WISE, np.inf)
    bounded = np.where(cut, units.computed_tokens, units.complete_tokens)
    return tuple(
        UnitReport(
            unit=u,
            replica=int(units.replica[u]),
            kind=KINDS[units.kind[u]],
            window=_optional(units.window[u]),
            slot=_optional(units.slot[u]),
            order=int(units.order[u]),
            rows=rows[u],
            complete_tokens=int(units.complete_tokens[u]),
            computed_tokens=int(units.computed_tokens[u]),
            padded_tokens=int(units.padded_tokens[u]),
            fill=int(bounded[u]) / capacity,
            spans=spans[u],
            sequences=calls[u],
            rounds=rounds[u],
            replay_tokens=replay[u],
        )
        for u in range(bundle.num_units)
    )


def _optional(value: Any) -> int | None:
    return None if value == NONE else int(value)


def _slot_reports(bundle: PlanBundle, consumers: list[UnitReport]) -> tuple[SlotReport, ...]:
    slots: dict[int, list[UnitReport]] = {}
    for unit in consumers:
        slots.setdefault(-1 if unit.slot is None else unit.slot, []).append(unit)
    reports = []
    for slot, units in sorted(slots.items()):
        computed = [u.computed_tokens for u in units]
        reports.append(
            SlotReport(
                slot=slot,
                rows=sum(u.rows for u in units),
                complete_tokens=sum(u.complete_tokens for u in units),
                computed_tokens=sum(computed),
                padded_tokens=sum(u.padded_tokens for u in units),
                largest_computed=max(computed),
                balance=sum(computed) / (bundle.dp * max(computed)) if max(computed) else 1.0,
                fill=sum(u.fill for u in units) / bundle.dp,
                rounds=max(u.rounds for u in units),
            )
        )
    return tuple(reports)


def _replica_reports(bundle: PlanBundle, units: tuple[UnitReport, ...]) -> tuple[ReplicaReport, ...]:
    reports = []
    for replica in range(bundle.dp):
        mine = [u for u in units if u.replica == replica]
        index = [u.unit for u in mine]
        reports.append(
            ReplicaReport(
                replica=replica,
                units=len(mine),
                rows=sum(u.rows for u in mine),
                complete_tokens=sum(u.complete_tokens for u in mine),
                computed_tokens=sum(u.computed_tokens for u in mine),
                padded_tokens=sum(u.padded_tokens for u in mine),
                cost_forward=float(bundle.units.cost_forward[index].sum()),
                cost_backward=float(bundle.units.cost_backward[index].sum()),
            )
        )
    return tuple(reports)


def _window_reports(bundle: PlanBundle) -> tuple[WindowReport, ...]:
    units = bundle.units
    reports = []
    for window in range(len(bundle.windows)):
        mine = (units.kind == PRODUCER) & (units.window == window)
        reports.append(
            WindowReport(
                window=window,
                slot_start=int(bundle.windows.slot_start[window]),
                slot_stop=int(bundle.windows.slot_stop[window]),
                producers=int(mine.sum()),
                producer_tokens=int(units.computed_tokens[mine].sum()),
            )
        )
    return tuple(reports)
