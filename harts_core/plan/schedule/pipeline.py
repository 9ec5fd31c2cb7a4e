"""Pipeline schedules as data: what each stage of a replica's pipeline runs, in order.

The layers of the model are split over P stages. Every stage runs every unit: its forward on an activation
that the stage before sent, its backward on a gradient that the stage after sent. Interfaces (what a unit
keeps for those that import from it) never leave their stage.

All stages run the forwards in one order and the backwards in one order, those of the single process. What a
schedule decides is how far the backwards lag: on stage s every backward waits for lag · (P − 1 − s) more
*consumer* forwards than on the last stage. Producers advance no count, so one-forward-one-backward runs
on over the bounds of windows. Windows kept apart, and limits on live producers, are deadlines in that order
that are the same on all stages. The lag never grows from one stage to the next and deadlines are common, so a
stage never waits for a forward that its neighbour has put after the backward that it is waiting for: no
deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from harts_core.errors import ConfigError
from harts_core.plan.bundle import PRODUCER, PlanBundle
from harts_core.plan.schedule.backward_first import backward_first_places
from harts_core.plan.schedule.orders import (
    Int64,
    UnitOrder,
    latest_places,
    merge,
    producer_deadlines,
    unit_order,
    window_deadlines,
)
from harts_core.plan.schedule.units import Event, UnitLinks, peak_alive, unit_events, unit_links

ScheduleKind = Literal["harts", "non-overlapping", "backward-first"]
SCHEDULES: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
"""Kinds of schedule; the first is the one to train with, the others are for comparison."""
DEFAULT_LAG = 2
"""One microbatch in reserve for each following stage: with 1 a stage waits whenever its neighbour has a
longer microbatch than its own, with more than 2 hardly less (docs/schedule.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """What a replica's pipeline runs.

    Sends do not block: a stage goes on once a transfer is posted. Each pair of neighbours has one channel for
    activations and one for gradients, with transfers in the same order on both sides. Channels are
    independent: a transfer that waits for one neighbour must not hold up those with the other (one
    communicator for a whole direction of a long pipeline can deadlock).

    Attributes:
        kind: ``harts``: consumers one forward, one backward over all windows. ``non-overlapping``: the same
            within a window, and nothing of a window runs before the one before it is done.
            ``backward-first``: windows overlap, but whenever a stage is free (by the plan's costs) a
            backward that can run does, and a forward only fills the time until it can; never more
            consumers in flight than in ``harts``.
        replica: whose pipeline it is.
        units: unit ids in forward order.
        training: False: forward only.
        max_live_producers: producers that may be alive on one stage.
        stages: for each stage its events, in order. A receive comes right before the forward or backward that
            needs it, a send right after.
    """

    kind: ScheduleKind
    replica: int
    units: tuple[int, ...]
    training: bool
    max_live_producers: int
    stages: tuple[tuple[Event, ...], ...]

    @property
    def num_stages(self) -> int:
        """P."""
        return len(self.stages)


def pipeline_schedule(
    bundle: PlanBundle,
    *,
    num_stages: int,
    replica: int,
    kind: ScheduleKind = "harts",
    units: Sequence[int] | None = None,
    links: UnitLinks | None = None,
    lag: int = DEFAULT_LAG,
    max_live_producers: int | None = None,
    training: bool = True,
) -> PipelineSchedule:
    """The events of every stage of one replica's pipeline.

    Args:
        bundle: a valid plan.
        num_stages: P ≥ 1; one stage gives the single-process order, without transfers.
        replica: in [0, D).
        kind: see :class:`PipelineSchedule`.
        units: the replica's units in forward order, with a unit all that it imports from and all that import
            from it (a minibatch); all of the replica if not given.
        links: who imports from whom, where more has to hold than the plan says: replicas that run in lockstep
            wait for each other's importers. Of the kinds, ``backward-first`` depends on costs and keeps no
            lockstep.
        lag: consumer forwards by which the backwards of a stage lag behind those of the next stage. 1 is the
            usual one forward, one backward; more keeps up to lag · (P − 1 − s) + 1 consumers in flight on
            stage s and evens out consumers of unequal cost.
        max_live_producers: on one stage; by default P for each level of nested producers. A stage holds 1/P
            of a producer's layers: that is no more memory than the single process needs. With lag 1 windows
            never have more alive; with a larger lag only those of fewer slots than the lag could.
        training: False: forward only; a unit is freed when the last unit that imports from it has run.

    Raises:
        ConfigError: no such replica or kind, ``num_stages`` or ``lag`` < 1, or a limit that even one stage
            exceeds.
    """
    for name, value in (("num_stages", num_stages), ("lag", lag)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}", where="pipeline schedule")
    if not 0 <= replica < bundle.dp:
        raise ConfigError(f"there is no replica {replica}: the plan has {bundle.dp}", where="replica")
    if kind not in SCHEDULES:
        raise ConfigError(f"unknown schedule {kind!r}", hint=f"one of {', '.join(SCHEDULES)}")
    mine = bundle.units_of_replica(replica).tolist() if units is None else list(units)
    single = unit_events(links or unit_links(bundle), mine, training=training)
    producer = bundle.units.kind == PRODUCER
    nested = peak_alive(single, producer)
    lags = [lag * (num_stages - 1 - s) for s in range(num_stages)]
    limit = max(num_stages * nested, 1) if max_live_producers is None else max_live_producers
    if nested > limit:
        raise ConfigError(
            f"at most {limit} live producers are allowed, but {nested} of the plan's are nested",
            where="max_live_producers",
            hint=f"allow {nested}, or plan with --max-live-producers {max(limit, 1)}",
        )
    if training:
        order = unit_order(single, producer=producer)
        stages = [merge(order, places) for places in _places(bundle, order, kind, lags, limit)]
    else:
        stages = [list(single)] * num_stages
    return PipelineSchedule(
        kind=kind,
        replica=replica,
        units=tuple(mine),
        training=training,
        max_live_producers=limit,
        stages=tuple(
            _with_transfers(events, first=s == 0, last=s == num_stages - 1) for s, events in enumerate(stages)
        ),
    )


def _places(
    bundle: PlanBundle, order: UnitOrder, kind: ScheduleKind, lags: list[int], limit: int
) -> list[Int64]:
    """For each stage how many forwards come before each backward."""
    deadlines = producer_deadlines(order, limit)
    if kind == "non-overlapping":
        deadlines = np.minimum(deadlines, window_deadlines(order, bundle.units.window))
    latest = [latest_places(order, lag, deadlines) for lag in lags]
    if kind != "backward-first":
        return latest
    return backward_first_places(
        order,
        latest,
        forward_time=bundle.units.cost_forward / len(lags),
        backward_time=bundle.units.cost_backward / len(lags),
    )


def _with_transfers(events: Sequence[Event], *, first: bool, last: bool) -> tuple[Event, ...]:
    """The stage's events with what its neighbours send it and what it sends them."""
    result: list[Event] = []
    for event in events:
        unit = event.unit
        if event.kind == "forward" and not first:
            result.append(Event(kind="receive_activation", unit=unit))
        if event.kind == "backward" and not last:
            result.append(Event(kind="receive_gradient", unit=unit))
        result.append(event)
        if event.kind == "forward" and not last:
            result.append(Event(kind="send_activation", unit=unit))
        if event.kind == "backward" and not first:
            result.append(Event(kind="send_gradient", unit=unit))
    return tuple(result)
