"""Where second forwards come, and how many graphs are alive: by hand, and on plans against a plain count."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest

from harts_core.plan.recompute import Recompute
from harts_core.plan.schedule.pipeline import SCHEDULES, pipeline_schedule
from harts_core.plan.schedule.second_forwards import peak_graphs, with_second_forwards
from harts_core.plan.schedule.units import Event, unit_events, unit_links
from tests.support_train import random_tree
from tests.support_windows import chain_bundle, nested_bundle

SHORT = {"F": "forward", "R": "recompute", "B": "backward", "X": "free", "<": "receive_activation"} | {
    ">": "send_activation",
    "g": "receive_gradient",
    "G": "send_gradient",
}
TREE = random_tree(5, num_rows=14)
PLANS = {
    "nested": nested_bundle(TREE, dp=1, slots=5, levels=2, chunk=4, seed=3),
    "chain": chain_bundle(TREE, units=5, chunk=4),
}


def events_of(text: str) -> tuple[Event, ...]:
    """For example "F0 F1 B1 X1 B0 X0"."""
    return tuple(Event(kind=SHORT[e[0]], unit=int(e[1:])) for e in text.split())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("F0 B0 X0 F1 B1 X1", "F0 B0 X0 F1 B1 X1"),
        ("F0 F1 B1 X1 F2 B2 X2 B0 X0", "F0 F1 B1 X1 F2 B2 X2 R0 B0 X0"),
        ("F0 F1 F2 B2 X2 B1 X1 B0 X0", "F0 F1 F2 B2 X2 R1 B1 X1 R0 B0 X0"),
        ("F0 X0 F1 X1", "F0 X0 F1 X1"),
        (
            "<0 F0 >0 <1 F1 >1 g0 B0 G0 X0 g1 B1 G1 X1",
            "<0 F0 >0 <1 F1 >1 R0 g0 B0 G0 X0 R1 g1 B1 G1 X1",
        ),
        ("F0 >0 g0 B0 X0", "F0 >0 g0 B0 X0"),
    ],
    ids=["alone", "window", "chain", "forward only", "pipeline", "one unit in a pipeline"],
)
def test_where_they_come(before: str, after: str) -> None:
    for recompute in get_args(Recompute):
        expected = after if recompute.startswith("unit") else before
        assert with_second_forwards(events_of(before), recompute) == events_of(expected)


def test_peak() -> None:
    weight = np.array([5, 3, 4])
    chain = events_of("F0 F1 F2 B2 X2 B1 X1 B0 X0")
    assert peak_graphs(chain, weight) == 12
    assert peak_graphs(with_second_forwards(chain, "unit"), weight) == 5
    window = events_of("F0 F1 B1 X1 F2 B2 X2 B0 X0")
    assert peak_graphs(window, weight) == 9
    assert peak_graphs(with_second_forwards(window, "unit"), weight) == 5


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("plan", PLANS)
def test_one_graph_at_a_time(plan: str, kind: str, num_stages: int) -> None:
    """On every stage of every schedule; the other events stay as they are."""
    bundle = PLANS[plan]
    schedule = pipeline_schedule(bundle, num_stages=num_stages, replica=0, kind=kind)  # type: ignore[arg-type]
    one = np.ones(bundle.num_units, np.int64)
    more_than_one = 0
    for events in schedule.stages:
        again = with_second_forwards(events, "unit")
        assert tuple(e for e in again if e.kind != "recompute") == events
        assert peak_graphs(again, one) == 1
        more_than_one += peak_graphs(events, one) > 1
        for before, event in itertools.pairwise(again):
            if event.kind == "receive_gradient" and before.kind == "recompute":
                assert before.unit == event.unit
    assert more_than_one


def test_a_chain_of_a_whole_step() -> None:
    bundle = PLANS["chain"]
    events = unit_events(unit_links(bundle), bundle.units_of_replica(0).tolist())
    padded = bundle.units.padded_tokens
    assert peak_graphs(with_second_forwards(events, "unit"), padded) == padded.max()
    assert peak_graphs(events, padded) > 2 * padded.max()
