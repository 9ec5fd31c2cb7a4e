"""Event lists of pipelines: by hand for small plans, and the rules of each kind."""

from __future__ import annotations

import pytest

from harts_core.errors import ConfigError
from harts_core.plan.bundle import PRODUCER, PlanBundle
from harts_core.plan.schedule.check import check_schedule
from harts_core.plan.schedule.pipeline import SCHEDULES, PipelineSchedule, pipeline_schedule
from harts_core.plan.schedule.units import UnitLinks, peak_alive, unit_events, unit_links
from tests.support_train import plan_of, random_tree
from tests.support_windows import chain_bundle, nested_bundle, window_bundle


def passes(schedule: PipelineSchedule) -> list[str]:
    """For each stage its forwards (F) and backwards (B) with their units."""
    short = {"forward": "F", "backward": "B"}
    return [
        " ".join(f"{short[e.kind]}{e.unit}" for e in events if e.kind in short) for events in schedule.stages
    ]


def two_windows(*, slots: int = 4, dp: int = 1, seed: int = 3) -> PlanBundle:
    """Two windows of ``slots`` / 2, one producer each and replica."""
    tree = random_tree(seed, num_rows=6 * slots * dp)
    outer = [0] * (slots // 2) + [1] * (slots // 2)
    bundle = nested_bundle(tree, dp=dp, slots=slots, levels=1, chunk=4, seed=seed, outer=outer)
    assert (bundle.units.kind == PRODUCER).sum() == 2 * dp
    return bundle


def test_without_windows_it_is_the_usual_one_forward_one_backward() -> None:
    bundle = plan_of(random_tree(0, num_rows=12), slots=4)
    for kind in SCHEDULES[:2]:
        assert passes(pipeline_schedule(bundle, num_stages=3, replica=0, kind=kind, lag=1)) == [
            "F0 F1 F2 B0 F3 B1 B2 B3",
            "F0 F1 B0 F2 B1 F3 B2 B3",
            "F0 B0 F1 B1 F2 B2 F3 B3",
        ]


def test_producers_take_no_slot_and_windows_overlap() -> None:
    bundle = two_windows()
    assert bundle.units_of_replica(0).tolist() == [0, 2, 3, 1, 4, 5]  # units 0 and 1 are the producers
    last = "F0 F2 B2 F3 B3 B0 F1 F4 B4 F5 B5 B1"
    for lag, first in (
        (1, "F0 F2 F3 B2 F1 F4 B3 B0 F5 B4 B5 B1"),
        (2, "F0 F2 F3 F1 F4 B2 F5 B3 B0 B4 B5 B1"),
    ):
        assert passes(pipeline_schedule(bundle, num_stages=2, replica=0, lag=lag)) == [first, last]
        apart = pipeline_schedule(bundle, num_stages=2, replica=0, lag=lag, kind="non-overlapping")
        assert passes(apart) == ["F0 F2 F3 B2 B3 B0 F1 F4 F5 B4 B5 B1", last]


def test_a_larger_lag_keeps_more_consumers_in_flight() -> None:
    bundle = plan_of(random_tree(0, num_rows=12), slots=5)
    expected = [
        "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]
    assert passes(pipeline_schedule(bundle, num_stages=3, replica=0, lag=2)) == expected
    assert passes(pipeline_schedule(bundle, num_stages=3, replica=0)) == expected  # the default


def test_a_larger_lag_keeps_no_more_producers_alive() -> None:
    """Windows of one slot: P of their producers, whatever the lag."""
    bundle = nested_bundle(
        random_tree(4, num_rows=40), dp=1, slots=6, levels=1, chunk=4, seed=4, outer=list(range(6))
    )
    producer = bundle.units.kind == PRODUCER
    assert producer.sum() == 6
    for lag in (1, 2, 3):
        schedule = pipeline_schedule(bundle, num_stages=3, replica=0, lag=lag)
        assert schedule.max_live_producers == 3
        assert peak_alive(schedule.stages[0], producer) == 3
        check_schedule(bundle, schedule)
    wide = pipeline_schedule(bundle, num_stages=3, replica=0, lag=2, max_live_producers=9)
    assert peak_alive(wide.stages[0], producer) == 5


def test_transfers_stand_beside_their_passes() -> None:
    bundle = plan_of(random_tree(0, num_rows=12), slots=2)
    schedule = pipeline_schedule(bundle, num_stages=3, replica=0)
    middle = [(e.kind, e.unit) for e in schedule.stages[1]]
    forward = [(kind, u) for u in (0, 1) for kind in ("receive_activation", "forward", "send_activation")]
    backward = [
        (kind, u) for u in (0, 1) for kind in ("receive_gradient", "backward", "send_gradient", "free")
    ]
    assert middle == forward + backward
    assert {e.kind for e in schedule.stages[0]} == {
        "forward",
        "send_activation",
        "receive_gradient",
        "backward",
        "free",
    }


def test_a_limit_on_live_producers_delays_only_the_next_producer() -> None:
    bundle = two_windows()
    schedule = pipeline_schedule(bundle, num_stages=2, replica=0, lag=1, max_live_producers=1)
    assert passes(schedule)[0] == "F0 F2 F3 B2 B3 B0 F1 F4 F5 B4 B5 B1"
    check_schedule(bundle, schedule)
    producer = bundle.units.kind == PRODUCER
    assert [peak_alive(events, producer) for events in schedule.stages] == [1, 1]
    free = pipeline_schedule(bundle, num_stages=2, replica=0)
    assert free.max_live_producers == 2
    assert [peak_alive(events, producer) for events in free.stages] == [2, 1]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_one_stage_is_the_single_process(kind: str) -> None:
    tree = random_tree(5, num_rows=16)
    for bundle in (
        plan_of(tree, slots=3),
        window_bundle(tree, chunk=4, consumers=4),
        nested_bundle(tree, dp=2, slots=4, levels=3, chunk=4, seed=2),
        chain_bundle(tree, units=5, chunk=4),
    ):
        for replica in range(bundle.dp):
            mine = bundle.units_of_replica(replica).tolist()
            for training in (True, False):
                schedule = pipeline_schedule(
                    bundle,
                    num_stages=1,
                    replica=replica,
                    kind=kind,  # type: ignore[arg-type]
                    training=training,
                )
                assert schedule.stages == (unit_events(unit_links(bundle), mine, training=training),)


def test_a_chain_turns_round_once_for_all_stages() -> None:
    bundle = chain_bundle(random_tree(2, num_rows=6), units=4, chunk=4)
    for kind in SCHEDULES:
        schedule = pipeline_schedule(bundle, num_stages=3, replica=0, kind=kind)
        check_schedule(bundle, schedule)
        assert passes(schedule)[2] == passes(pipeline_schedule(bundle, num_stages=1, replica=0))[0]


def test_some_units_of_a_replica() -> None:
    bundle = two_windows()
    schedule = pipeline_schedule(bundle, num_stages=2, replica=0, units=(1, 4, 5))
    check_schedule(bundle, schedule)
    assert passes(schedule) == ["F1 F4 F5 B4 B5 B1", "F1 F4 B4 F5 B5 B1"]  # both in flight with any lag


def test_links_beyond_the_plan() -> None:
    """Consumer 4 of the second window waits for consumer 2 of the first, as it may on another replica."""
    bundle = two_windows()
    links = unit_links(bundle)
    owners, importers = list(links.owners), list(links.importers)
    owners[4], importers[2] = (*owners[4], 2), (*importers[2], 4)
    schedule = pipeline_schedule(
        bundle, num_stages=2, replica=0, links=UnitLinks(owners=tuple(owners), importers=tuple(importers))
    )
    check_schedule(bundle, schedule)
    assert passes(schedule)[1] == "F0 F2 F3 B3 F1 F4 B4 B2 B0 F5 B5 B1"


def test_wrong_arguments() -> None:
    bundle = window_bundle(random_tree(1), chunk=4, consumers=3)
    with pytest.raises(ConfigError, match="num_stages must be at least 1, not 0"):
        pipeline_schedule(bundle, num_stages=0, replica=0)
    with pytest.raises(ConfigError, match="lag must be at least 1, not 0"):
        pipeline_schedule(bundle, num_stages=2, replica=0, lag=0)
    for replica in (-1, 1):
        with pytest.raises(ConfigError, match=f"no replica {replica}: the plan has 1"):
            pipeline_schedule(bundle, num_stages=2, replica=replica)
    with pytest.raises(ConfigError, match="unknown schedule"):
        pipeline_schedule(bundle, num_stages=2, replica=0, kind="gpipe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at most 0 live producers are allowed, but 1 of the plan's"):
        pipeline_schedule(bundle, num_stages=2, replica=0, max_live_producers=0)
