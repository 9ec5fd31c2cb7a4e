"""The validator of pipeline schedules: reads the plan's tables itself, shares no code with the generator."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

import numpy as np

from harts_core.errors import InvalidPlanError
from harts_core.plan.bundle import PRODUCER, PlanBundle
from harts_core.plan.schedule.pipeline import PipelineSchedule
from harts_core.plan.schedule.units import Event

_FROM = {"activation": -1, "gradient": 1}
"""What is received, and which stage sends it, counted from the receiver's."""


def check_schedule(bundle: PlanBundle, schedule: PipelineSchedule) -> None:
    """Check that a schedule runs a plan, whoever made it.

    On every stage each unit has one forward, one backward (training) and one free; a unit runs forward after
    those that it imports from, backward before them and after those that import from it; nothing is freed
    while it is needed; no more producers are alive than the schedule states. Between stages every activation
    and gradient is sent once its pass has run and received before the pass that needs it; both sides of a
    channel have its transfers in one order; and the whole runs to its end.

    Raises:
        InvalidPlanError: the first broken rule, naming stage, event and unit.
    """
    _check_units(bundle, schedule)
    imports = _imports(bundle, schedule.units)
    for stage, events in enumerate(schedule.stages):
        at = _check_events(schedule, stage, events)
        _check_imports(schedule, stage, at, imports)
        _check_live(bundle, schedule, stage, events)
    _check_progress(schedule)


def _fail(what: str, where: str) -> InvalidPlanError:
    return InvalidPlanError(f"pipeline schedule: {what}", where=where)


def _check_units(bundle: PlanBundle, schedule: PipelineSchedule) -> None:
    if not schedule.stages:
        raise _fail("there are no stages", "stages")
    for unit in schedule.units:
        if not 0 <= unit < bundle.num_units or bundle.units.replica[unit] != schedule.replica:
            raise _fail(f"not a unit of replica {schedule.replica}", f"unit {unit}")
    if len(set(schedule.units)) != len(schedule.units):
        raise _fail("a unit is listed twice", "units")


def _imports(bundle: PlanBundle, units: Iterable[int]) -> list[tuple[int, int]]:
    """(unit, owner) of all imports that one of the units takes part in."""
    mine = np.isin(np.arange(bundle.num_units), list(units))
    unit, owner = bundle.spans.unit, bundle.spans.owner
    lines = np.flatnonzero((unit != owner) & (mine[unit] | mine[owner]))
    for line in lines:
        if mine[unit[line]] != mine[owner[line]]:
            raise _fail(
                f"unit {unit[line]} imports from unit {owner[line]}, only one of them is listed", "units"
            )
    return sorted(set(zip(unit[lines].tolist(), owner[lines].tolist(), strict=True)))


def _check_events(
    schedule: PipelineSchedule, stage: int, events: tuple[Event, ...]
) -> dict[tuple[str, int], int]:
    """Each unit has the events that the stage needs, once each, in a sound order; where each event is."""
    first, last = stage == 0, stage == schedule.num_stages - 1
    wanted = [] if first else ["receive_activation"]
    wanted += ["forward"] + ([] if last else ["send_activation"])
    if schedule.training:
        wanted += ([] if last else ["receive_gradient"]) + ["backward"]
        wanted += [] if first else ["send_gradient"]
    wanted += ["free"]
    at: dict[tuple[str, int], int] = {}
    for i, event in enumerate(events):
        if (event.kind, event.unit) in at:
            raise _fail(f"{event.kind} of unit {event.unit} comes twice", f"stage {stage}, event {i}")
        at[event.kind, event.unit] = i
    expected = {(kind, unit) for unit in schedule.units for kind in wanted}
    for kind, unit in sorted(expected ^ at.keys()):
        found = "is not expected" if (kind, unit) in at else "is missing"
        raise _fail(f"{kind} of unit {unit} {found}", f"stage {stage}")
    for unit in schedule.units:
        for before, after in itertools.pairwise(wanted):
            if at[before, unit] > at[after, unit]:
                raise _fail(f"{before} of unit {unit} comes after its {after}", f"stage {stage}")
    return at


def _check_imports(
    schedule: PipelineSchedule, stage: int, at: dict[tuple[str, int], int], imports: list[tuple[int, int]]
) -> None:
    end = "backward" if schedule.training else "forward"
    for unit, owner in imports:
        rules = [("forward", owner, "forward", unit), (end, unit, "free", owner)]
        if schedule.training:
            rules.append(("backward", unit, "backward", owner))
        for kind, one, next_kind, other in rules:
            if at[kind, one] > at[next_kind, other]:
                raise _fail(
                    f"{kind} of unit {one} comes after {next_kind} of unit {other}, but unit {unit} imports "
                    f"from unit {owner}",
                    f"stage {stage}",
                )


def _check_live(
    bundle: PlanBundle, schedule: PipelineSchedule, stage: int, events: tuple[Event, ...]
) -> None:
    alive: set[int] = set()
    for i, event in enumerate(events):
        if bundle.units.kind[event.unit] == PRODUCER and event.kind == "forward":
            alive.add(event.unit)
        elif event.kind == "free":
            alive.discard(event.unit)
        if len(alive) > schedule.max_live_producers:
            raise _fail(
                f"{len(alive)} producers are alive, the limit is {schedule.max_live_producers}",
                f"stage {stage}, event {i}",
            )


def _check_progress(schedule: PipelineSchedule) -> None:
    """Run the lists: a send goes into the channel to that neighbour, a receive takes the next one of it."""
    stages = schedule.stages
    channels = {(s, what): deque[int]() for s in range(len(stages)) for what in _FROM}
    position = [0] * len(stages)
    moved = True
    while moved:
        moved = False
        for s, events in enumerate(stages):
            while position[s] < len(events) and _run(events[position[s]], s, channels):
                position[s] += 1
                moved = True
    for s, events in enumerate(stages):
        if position[s] < len(events):
            event = events[position[s]]
            raise _fail(f"deadlock: {event.kind} of unit {event.unit} waits for ever", f"stage {s}")


def _run(event: Event, stage: int, channels: dict[tuple[int, str], deque[int]]) -> bool:
    """Carry out one event; False if it has to wait. ``channels``: units sent, by sender and what was sent."""
    action, _, what = event.kind.partition("_")
    if action == "send":
        channels[stage, what].append(event.unit)
    if action == "receive":
        sender = stage + _FROM[what]
        if not channels[sender, what]:
            return False
        unit = channels[sender, what].popleft()
        if unit != event.unit:
            raise _fail(
                f"stage {sender} sends the {what} of unit {unit}, stage {stage} expects that of unit "
                f"{event.unit}",
                f"stages {sender} and {stage}",
            )
    return True
