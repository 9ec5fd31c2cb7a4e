"""The validator of schedules refuses every kind of broken list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harts_core.errors import InvalidPlanError
from harts_core.plan.schedule.check import check_schedule
from harts_core.plan.schedule.pipeline import PipelineSchedule, pipeline_schedule
from harts_core.plan.schedule.units import Event, EventKind
from tests.support_train import random_tree
from tests.support_windows import window_bundle

BUNDLE = window_bundle(random_tree(1), chunk=4, consumers=3, seed=8)
SCHEDULE = pipeline_schedule(BUNDLE, num_stages=3, replica=0, lag=1)


def edited(stage: int, edit: Callable[[list[Event]], None]) -> PipelineSchedule:
    stages = [list(events) for events in SCHEDULE.stages]
    edit(stages[stage])
    return replace(SCHEDULE, stages=tuple(tuple(events) for events in stages))


def find(events: list[Event], kind: EventKind, unit: int) -> int:
    return events.index(Event(kind=kind, unit=unit))


def move(kind: EventKind, unit: int, to_kind: EventKind, to_unit: int) -> Callable[[list[Event]], None]:
    """Put an event right before another one."""

    def edit(events: list[Event]) -> None:
        event = events.pop(find(events, kind, unit))
        events.insert(find(events, to_kind, to_unit), event)

    return edit


def move_pass(kinds: list[EventKind], unit: int, to: tuple[EventKind, int]) -> Callable[[list[Event]], None]:
    """Put a pass with its transfers right before another event."""

    def edit(events: list[Event]) -> None:
        for kind in kinds:
            move(kind, unit, *to)(events)

    return edit


def refused(schedule: PipelineSchedule, match: str) -> None:
    with pytest.raises(InvalidPlanError, match=match):
        check_schedule(BUNDLE, schedule)


def test_the_schedule_itself_is_valid() -> None:
    check_schedule(BUNDLE, SCHEDULE)


def test_events_that_are_missing_or_too_many() -> None:
    refused(edited(1, lambda e: e.pop(find(e, "backward", 2)) and None), "backward of unit 2 is missing")
    refused(edited(1, lambda e: e.append(Event(kind="forward", unit=1))), "forward of unit 1 comes twice")
    refused(
        edited(0, lambda e: e.append(Event(kind="receive_activation", unit=1))),
        "receive_activation of unit 1 is not expected",
    )
    refused(replace(SCHEDULE, stages=()), "there are no stages")
    refused(replace(SCHEDULE, units=(0, 1, 2)), "imports from unit 0, only one of them is listed")
    refused(replace(SCHEDULE, units=(0, 1, 2, 3, 3)), "listed twice")
    refused(replace(SCHEDULE, units=(0, 1, 2, 9)), "not a unit of replica 0")
    refused(replace(SCHEDULE, training=False), "is not expected")


def test_events_of_a_unit_in_a_wrong_order() -> None:
    refused(edited(0, move("send_activation", 1, "forward", 1)), "forward of unit 1 comes after its send_act")
    refused(edited(1, move("free", 1, "backward", 1)), "unit 1 comes after its free")
    refused(edited(1, move("backward", 1, "receive_gradient", 1)), "receive_gradient of unit 1 comes after")


def test_imports() -> None:
    early: list[EventKind] = ["forward", "send_activation"]
    refused(edited(0, move_pass(early, 1, ("forward", 0))), "forward of unit 0 comes after forward of unit 1")
    late: list[EventKind] = ["backward", "send_gradient", "free"]
    refused(edited(2, move_pass(late, 0, ("backward", 3))), "backward of unit 3 comes after .* of unit 0")


def test_more_producers_alive_than_stated() -> None:
    refused(replace(SCHEDULE, max_live_producers=0), "1 producers are alive, the limit is 0")


def test_deadlock() -> None:
    """Stage 0 waits for unit 1's gradient before it sends the forward of unit 2 that stage 1 runs first."""
    early: list[EventKind] = ["receive_gradient", "backward", "free"]
    check_schedule(BUNDLE, edited(0, move_pass(early, 1, ("forward", 3))))  # slower, but it runs
    refused(edited(0, move_pass(early, 1, ("forward", 2))), "deadlock: receive_gradient of unit 1")


def test_transfers_in_different_orders() -> None:
    """Stage 1 wants unit 2 before unit 1; both are there."""
    forward: list[EventKind] = ["receive_activation", "forward", "send_activation"]
    schedule = edited(1, move_pass(forward, 2, ("receive_activation", 1)))
    refused(schedule, "stage 0 sends the activation of unit 1, stage 1 expects that of unit 2")
