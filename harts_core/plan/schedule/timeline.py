"""Simulated timelines: how long a pipeline schedule takes under the plan's cost model, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from harts_core.plan.bundle import PRODUCER, PlanBundle
from harts_core.plan.schedule.pipeline import PipelineSchedule
from harts_core.plan.schedule.units import peak_alive, unit_links


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A unit's forward or backward on one stage.

    Attributes:
        stage: 0 is the one with the embedding.
        kind: which of the two.
        unit: unit id.
        start, stop: in the cost model's unit.
    """

    stage: int
    kind: Literal["forward", "backward"]
    unit: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated run of a schedule.

    Attributes:
        passes: stage after stage, in the order in which they run.
        makespan: when the last pass ends.
        busy: for each stage the time in passes.
        bubble_share: 1 − Σ busy / (stages · makespan).
        peak_producers: for each stage the most producers alive at once.
        peak_interface_tokens: for each stage the most computed tokens alive at once of units that others
            import from.
        peak_activation_tokens: for each stage the most padded tokens alive at once of all units; their
            activations are those of the stage's layers only.
    """

    passes: tuple[Pass, ...]
    makespan: float
    busy: tuple[float, ...]
    bubble_share: float
    peak_producers: tuple[int, ...]
    peak_interface_tokens: tuple[int, ...]
    peak_activation_tokens: tuple[int, ...]


def simulate(bundle: PlanBundle, schedule: PipelineSchedule) -> Timeline:
    """Run a schedule on the costs of its plan.

    A pass takes 1/P of its unit's forward or backward cost on every stage and starts when the stage is free
    and what it receives has been computed. Embedding, head, transfers and the optimizer take no time.

    Args:
        bundle: the plan.
        schedule: a valid one for it.
    """
    runs = _passes(bundle, schedule)
    producer = bundle.units.kind == PRODUCER
    owner = np.array([len(found) > 0 for found in unit_links(bundle).importers])
    interface = np.where(owner, bundle.units.computed_tokens, 0)
    busy = tuple(sum(p.stop - p.start for p in run) for run in runs)
    makespan = max((run[-1].stop for run in runs if run), default=0.0)
    return Timeline(
        passes=tuple(p for run in runs for p in run),
        makespan=makespan,
        busy=busy,
        bubble_share=1 - sum(busy) / (len(runs) * makespan) if makespan else 0.0,
        peak_producers=tuple(peak_alive(events, producer) for events in schedule.stages),
        peak_interface_tokens=tuple(peak_alive(events, interface) for events in schedule.stages),
        peak_activation_tokens=tuple(
            peak_alive(events, bundle.units.padded_tokens) for events in schedule.stages
        ),
    )


def _passes(bundle: PlanBundle, schedule: PipelineSchedule) -> list[list[Pass]]:
    """For each stage its passes in order. Stages take turns: each runs on until it has to wait."""
    cost = {"forward": bundle.units.cost_forward, "backward": bundle.units.cost_backward}
    num_stages = schedule.num_stages
    arrived: list[dict[tuple[str, int], float]] = [{} for _ in range(num_stages)]
    position = [0] * num_stages
    runs: list[list[Pass]] = [[] for _ in range(num_stages)]
    now = [0.0] * num_stages
    moved = True
    while moved:
        moved = False
        for s, events in enumerate(schedule.stages):
            while position[s] < len(events):
                kind, unit = events[position[s]].kind, events[position[s]].unit
                if kind.startswith("receive"):
                    if (kind, unit) not in arrived[s]:
                        break
                    now[s] = max(now[s], arrived[s][kind, unit])
                elif kind == "send_activation":
                    arrived[s + 1]["receive_activation", unit] = now[s]
                elif kind == "send_gradient":
                    arrived[s - 1]["receive_gradient", unit] = now[s]
                elif kind in ("forward", "backward"):
                    stop = now[s] + float(cost[kind][unit]) / num_stages
                    runs[s].append(Pass(stage=s, kind=kind, unit=unit, start=now[s], stop=stop))
                    now[s] = stop
                position[s] += 1
                moved = True
    return runs
