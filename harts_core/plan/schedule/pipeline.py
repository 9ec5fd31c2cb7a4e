"""Pipeline schedules as data: what each stage of a replica's pipeline runs, in order.

The layers of the model are split over P stages. Every stage runs every unit: its forward on an activation
that the stage before sent, its backward on a gradient that the stage after sent. Interfaces (what a unit
keeps for those that import from it) never leave their stage.

All stages run the forwards in one order and the backwards in one order, those of the single process. What a
schedule decides is how far the backwards lag: on stage s every backward waits for P − 1 − s more *consumer*
forwards than on the last stage. Producers advance no count, so one-forward-one-backward runs on over the
bounds of windows. The other kinds, and limits on live producers, give backwards a deadline in that order that
is the same on all stages. The lag never grows from one stage to the next and deadlines are common, so a stage
never waits for a forward that its neighbour has put after the backward that it is waiting for: no deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from harts_core.errors import ConfigError
from harts_core.plan.bundle import PRODUCER, PlanBundle
from harts_core.plan.schedule.units import Event, unit_events, unit_links

ScheduleKind = Literal["harts", "non-overlapping", "backward-first"]
SCHEDULES: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
"""Kinds of schedule; the first is the one to train with, the others are for comparison."""

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """What a replica's pipeline runs.

    Sends do not block: a stage goes on once a transfer is posted. Each pair of neighbours has one channel for
    activations and one for gradients, with transfers in the same order on both sides. Channels are
    independent: a transfer that waits for one neighbour must not hold up those with the other (one
    communicator for a whole direction of a long pipeline can deadlock).

    Attributes:
        kind: ``harts``: consumers one forward, one backward over all windows. ``backward-first``: the
            producer of the next window may run forward early, its consumers wait for all backwards of this
            one. ``non-overlapping``: also the next producer waits.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Order:
    """The single-process order of some units, as two lists and the backwards' place among the forwards.

    Attributes:
        forward: units in forward order.
        backward: units in backward order.
        earliest: int64 [backwards], forwards that must have run before each backward; never falls.
        producer: bool [units of the plan].
    """

    forward: list[int]
    backward: list[int]
    earliest: Int64
    producer: npt.NDArray[np.bool_]


def pipeline_schedule(
    bundle: PlanBundle,
    *,
    num_stages: int,
    replica: int,
    kind: ScheduleKind = "harts",
    units: Sequence[int] | None = None,
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
        max_live_producers: on one stage; by default P for each level of nested producers, which windows never
            exceed. A stage holds 1/P of a producer's layers, so that is the memory of the single process.
        training: False: forward only; a unit is freed when the last unit that imports from it has run.

    Raises:
        ConfigError: no such replica or kind, ``num_stages`` < 1, or a limit that even one stage exceeds.
    """
    if num_stages < 1:
        raise ConfigError(f"a pipeline has at least one stage, not {num_stages}", where="pipeline stages")
    if not 0 <= replica < bundle.dp:
        raise ConfigError(f"there is no replica {replica}: the plan has {bundle.dp}", where="replica")
    if kind not in SCHEDULES:
        raise ConfigError(f"unknown schedule {kind!r}", hint=f"one of {', '.join(SCHEDULES)}")
    links = unit_links(bundle)
    mine = bundle.units_of_replica(replica).tolist() if units is None else list(units)
    single = unit_events(links, mine, training=training)
    order = _order_of(single, producer=bundle.units.kind == PRODUCER)
    nested = most_live(single, order.producer)
    limit = max(num_stages * nested, 1) if max_live_producers is None else max_live_producers
    if nested > limit:
        raise ConfigError(
            f"at most {limit} live producers are allowed, but {nested} of the plan's are nested",
            where="max_live_producers",
            hint=f"allow {nested}, or plan with --max-live-producers {max(limit, 1)}",
        )
    if training:
        deadlines = _deadlines(order, bundle, kind=kind, limit=limit)
        stages = [_merge(order, _places(order, num_stages - 1 - s, deadlines)) for s in range(num_stages)]
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


def most_live(events: Sequence[Event], counted: npt.NDArray[np.bool_]) -> int:
    """The most units alive at once (between their forward and their free) among the counted ones.

    Args:
        events: of one stage.
        counted: bool [units of the plan].
    """
    live = most = 0
    for event in events:
        if counted[event.unit]:
            live += (event.kind == "forward") - (event.kind == "free")
            most = max(most, live)
    return most


def _order_of(single: Sequence[Event], *, producer: npt.NDArray[np.bool_]) -> _Order:
    forward: list[int] = []
    backward: list[int] = []
    earliest: list[int] = []
    for event in single:
        if event.kind == "forward":
            forward.append(event.unit)
        elif event.kind == "backward":
            backward.append(event.unit)
            earliest.append(len(forward))
    return _Order(
        forward=forward, backward=backward, earliest=np.array(earliest, np.int64), producer=producer
    )


def _window_bounds(order: _Order, bundle: PlanBundle) -> list[tuple[int, int]]:
    """Where consumers change their innermost window: (place of the first producer that runs for the new one,
    place of its first consumer) in the forward order."""
    consumers = np.flatnonzero(~order.producer[order.forward])
    window = bundle.units.window[np.array(order.forward)[consumers]]
    changes = np.flatnonzero(window[1:] != window[:-1])
    return [(int(consumers[j]) + 1, int(consumers[j + 1])) for j in changes]


def _deadlines(order: _Order, bundle: PlanBundle, *, kind: ScheduleKind, limit: int) -> Int64:
    """int64 [backwards], the place in the forward order before which each backward comes on every stage."""
    count = len(order.backward)
    deadlines = np.full(count, len(order.forward), np.int64)
    if kind != "harts":
        for producers, consumer in _window_bounds(order, bundle):
            place = producers if kind == "non-overlapping" else consumer
            done = np.searchsorted(order.earliest, producers, side="right")
            deadlines[:done] = np.minimum(deadlines[:done], place)
    frees = np.flatnonzero(order.producer[order.backward])
    starts = np.flatnonzero(order.producer[order.forward])
    for i in range(limit, len(starts)):  # one of the producers before has to be gone
        last = frees[i - limit]
        deadlines[: last + 1] = np.minimum(deadlines[: last + 1], starts[i])
    return deadlines


def _places(order: _Order, lag: int, deadlines: Int64) -> Int64:
    """int64 [backwards], how many forwards come before each on the stage whose backwards lag by ``lag``."""
    if not lag:
        return order.earliest
    consumer_ends = np.flatnonzero(~order.producer[order.forward]) + 1
    ends = np.append(consumer_ends, np.full(lag, len(order.forward)))
    done = np.searchsorted(consumer_ends, order.earliest, side="right")
    places: Int64 = np.minimum(ends[done + lag - 1], deadlines)
    return places


def _merge(order: _Order, places: Int64) -> list[Event]:
    """One stage's forwards and backwards; a unit is freed right after its backward."""
    events: list[Event] = []
    bounds = np.searchsorted(places, np.arange(len(order.forward) + 1), side="right").tolist()
    done = 0
    for i, unit in enumerate([*order.forward, None]):
        for ended in order.backward[done : bounds[i]]:
            events.append(Event(kind="backward", unit=ended))
            events.append(Event(kind="free", unit=ended))
        done = bounds[i]
        if unit is not None:
            events.append(Event(kind="forward", unit=unit))
    return events


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
