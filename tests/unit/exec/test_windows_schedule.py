"""The event list of a plan: orders, counts, and where a step may be cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from harts_core.errors import ConfigError
from harts_core.exec.schedule import first_slots, minibatch_units
from harts_core.plan.bundle import CONSUMER, PRODUCER, PlanBundle
from harts_core.plan.schedule.units import unit_events, unit_links
from tests.support_train import plan_of, random_tree
from tests.support_windows import chain_bundle, nested_bundle, window_bundle


def kinds(bundle: PlanBundle, *, training: bool = True) -> list[tuple[str, int]]:
    units = bundle.units_of_replica(0).tolist()
    return [(e.kind, e.unit) for e in unit_events(unit_links(bundle), units, training=training)]


def test_a_window_runs_one_producer_backward_after_its_last_consumer() -> None:
    bundle = window_bundle(random_tree(1), chunk=4, consumers=3, seed=8)
    consumer = [(k, u) for u in (1, 2, 3) for k in ("forward", "backward", "free")]
    assert kinds(bundle) == [("forward", 0), *consumer, ("backward", 0), ("free", 0)]
    assert kinds(bundle, training=False) == [
        ("forward", 0),
        *[(k, u) for u in (1, 2) for k in ("forward", "free")],
        ("forward", 3),
        ("free", 0),
        ("free", 3),
    ]


def test_a_chain_runs_backward_in_reverse() -> None:
    bundle = chain_bundle(random_tree(2, num_rows=6), units=4, chunk=4)
    links = unit_links(bundle)
    assert any(len(owners) > 1 for owners in links.owners)
    events = kinds(bundle)
    last = max(u for u in range(4) if links.owners[u])
    backward = [u for k, u in events if k == "backward"]
    assert backward[-1] == 0
    assert events.index(("backward", last)) == events.index(("forward", last)) + 1


@pytest.mark.parametrize("seed", range(25))
def test_orders_of_random_plans(seed: int) -> None:
    """Forward once, in order; backward once, after the last importer's; free right after; against the table
    of spans itself."""
    tree = random_tree(seed, num_rows=14)
    if seed % 3:
        bundle = nested_bundle(tree, dp=2, slots=4, levels=seed % 3 + 1, chunk=4, seed=seed)
    else:
        bundle = chain_bundle(tree, units=5, chunk=4)
    order = np.lexsort((bundle.units.order, bundle.units.replica)).tolist()
    for training in (True, False):
        events = unit_events(unit_links(bundle), order, training=training)
        at = {(e.kind, e.unit): i for i, e in enumerate(events)}
        assert len(at) == len(events) == bundle.num_units * (3 if training else 2)
        assert [e.unit for e in events if e.kind == "forward"] == order
        for unit, owner in zip(bundle.spans.unit.tolist(), bundle.spans.owner.tolist(), strict=True):
            last = "backward" if training else "forward"
            assert at["forward", owner] <= at["forward", unit]
            assert at[last, unit] < at["free", owner]
            assert not training or at["backward", unit] <= at["backward", owner]
        if training:
            assert all(at["free", u] == at["backward", u] + 1 for u in order)
            for unit in order:  # as early as can be: nothing else runs in between
                readers = {int(u) for u in bundle.spans.unit[bundle.spans.owner == unit]} - {unit}
                before = events[at["backward", unit] - 1]
                assert before.kind == "free" or (before.kind == "forward" and not readers)


def test_minibatches_are_runs_of_slots() -> None:
    bundle = plan_of(random_tree(3, num_rows=20), dp=2, slots=5)
    parts = minibatch_units(bundle, unit_links(bundle), 2)
    slots = [sorted({int(bundle.units.slot[u]) for u in part}) for part in parts]
    assert slots == [[0, 1], [2, 3, 4]]  # the bound nearest to 2.5, the lower one of two
    assert sorted(itertools.chain(*parts)) == list(range(10))
    for part in parts:
        assert list(part) == sorted(part, key=lambda u: (bundle.units.replica[u], bundle.units.order[u]))
    assert len(minibatch_units(bundle, unit_links(bundle), 5)) == 5
    with pytest.raises(ConfigError, match="falls into at most 5"):
        minibatch_units(bundle, unit_links(bundle), 6)


def test_minibatches_do_not_cut_windows_or_chains() -> None:
    tree = random_tree(4, num_rows=18)
    for bundle in (window_bundle(tree, chunk=4, consumers=4), chain_bundle(tree, units=4, chunk=4)):
        links = unit_links(bundle)
        slot = first_slots(bundle, links)
        whole = [len(minibatch_units(bundle, links, 1)[0])]
        assert whole == [bundle.num_units]
        most = 1 + sum(
            not any(slot[o] < cut <= slot[u] for u, owners in enumerate(links.owners) for o in owners)
            for cut in range(1, 4)
        )
        with pytest.raises(ConfigError, match="num_minibatches = 4"):
            minibatch_units(bundle, links, 4)
        assert most < 4
        for count in range(1, most + 1):
            for part in minibatch_units(bundle, links, count):
                assert all(set(links.owners[u]) | set(links.importers[u]) <= set(part) for u in part)


@pytest.mark.parametrize("seed", range(6))
def test_minibatches_of_random_windows(seed: int) -> None:
    tree = random_tree(seed, num_rows=24)
    bundle = nested_bundle(tree, dp=2, slots=6, levels=1, chunk=4, seed=seed)
    links = unit_links(bundle)
    slot = first_slots(bundle, links)
    assert (slot[bundle.units.kind == CONSUMER] == bundle.units.slot[bundle.units.kind == CONSUMER]).all()
    assert (slot[bundle.units.kind == PRODUCER] >= 0).all()
    with pytest.raises(ConfigError, match="share prefixes"):
        minibatch_units(bundle, links, 6)
