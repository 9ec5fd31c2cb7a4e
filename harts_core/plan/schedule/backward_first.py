"""List scheduling that prefers backwards: a stage that is free runs a backward if it has one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from harts_core.plan.schedule.orders import Float64, Int64, UnitOrder


@dataclass(slots=True, kw_only=True)
class _Stage:
    """A stage while its order is being made.

    Attributes:
        latest: how many forwards may come before each backward.
        places: how many did, of the backwards that have run.
        forwards: how many have run.
        free: when the last pass ends.
        activations, gradients: when they arrive, by unit.
    """

    latest: list[int]
    places: list[int] = field(default_factory=list)
    forwards: int = 0
    free: float = 0.0
    activations: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, float] = field(default_factory=dict)


def backward_first_places(
    order: UnitOrder, latest: Sequence[Int64], *, forward_time: Float64, backward_time: Float64
) -> list[Int64]:
    """The order in which passes run if a stage that is free runs its next backward as soon as the gradient is
    there, and its next forward only while it is not, as far as ``latest`` allows.

    Args:
        order: of the units.
        latest: for each stage int64 [backwards], how many forwards may come before each; for no backward more
            than on the stage before.
        forward_time, backward_time: float64 [units of the plan], of a pass on one stage.

    Returns:
        For each stage int64 [backwards], how many forwards come before each.
    """
    earliest = order.earliest.tolist()
    stages = [_Stage(latest=places.tolist()) for places in latest]
    stages[0].activations = dict.fromkeys(order.forward, 0.0)
    for _ in range(2 * len(order.forward) * len(stages)):
        start, is_forward, s = min((*_next_pass(order, earliest, stage), s) for s, stage in enumerate(stages))
        stage = stages[s]
        if is_forward:
            unit = order.forward[stage.forwards]
            stage.forwards += 1
            stage.free = start + float(forward_time[unit])
            onward = stages[s + 1].activations if s + 1 < len(stages) else stage.gradients
        else:
            unit = order.backward[len(stage.places)]
            stage.places.append(stage.forwards)
            stage.free = start + float(backward_time[unit])
            onward = stages[s - 1].gradients if s else {}
        onward[unit] = stage.free
    return [np.array(stage.places, np.int64) for stage in stages]


def _next_pass(order: UnitOrder, earliest: Sequence[int], stage: _Stage) -> tuple[float, bool]:
    """When the stage can start its next pass, and whether that is a forward; never: infinity."""
    backward = forward = math.inf
    done = len(stage.places)
    if done < len(order.backward) and earliest[done] <= stage.forwards:
        backward = max(stage.free, stage.gradients.get(order.backward[done], math.inf))
    if stage.forwards < len(order.forward) and stage.forwards < stage.latest[done]:
        forward = max(stage.free, stage.activations.get(order.forward[stage.forwards], math.inf))
    return min((backward, False), (forward, True))
