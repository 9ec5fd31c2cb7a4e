"""Replicas in lockstep: the same roles in the same order, and nobody's needs forgotten."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.exec.parallel.lockstep import lockstep_plan
from harts_core.plan.schedule.units import unit_events, unit_links
from tests.support_train import random_tree
from tests.support_windows import nested_bundle


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), dp=st.integers(1, 4), slots=st.integers(1, 4), levels=st.integers(1, 3))
def test_replicas_run_the_same_events(seed: int, dp: int, slots: int, levels: int) -> None:
    tree = random_tree(seed, num_rows=dp * slots + 4)
    bundle = nested_bundle(tree, dp=dp, slots=slots, levels=levels, chunk=16, seed=seed)
    plan = lockstep_plan(bundle, range(bundle.num_units))
    own = unit_links(bundle)
    position = [{unit: i for i, unit in enumerate(units)} for units in plan.units]
    shapes = []
    for units, at in zip(plan.units, position, strict=True):
        events = unit_events(plan.links, units)
        shapes.append([(event.kind, at[event.unit]) for event in events])
        when = {(event.kind, event.unit): i for i, event in enumerate(events)}
        for unit in units:
            assert plan.bundle.units.kind[unit] == plan.bundle.units.kind[plan.units[0][at[unit]]]
            if unit >= bundle.num_units:
                assert plan.bundle.span_offsets[unit] == plan.bundle.span_offsets[unit + 1]
                continue
            for owner in own.owners[unit]:
                assert when["forward", owner] < when["forward", unit]
                assert when["backward", owner] > when["backward", unit]
    assert all(shape == shapes[0] for shape in shapes)
    mine = [unit for units in plan.units for unit in units if unit < bundle.num_units]
    assert sorted(mine) == list(range(bundle.num_units))
    for replica, units in enumerate(plan.units):
        kept = [unit for unit in units if unit < bundle.num_units]
        assert np.array_equal(kept, bundle.units_of_replica(replica))
