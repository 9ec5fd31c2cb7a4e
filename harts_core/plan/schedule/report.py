"""Pipeline schedules of a plan compared: makespans, bubbles and what stages keep, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_core.errors import ConfigError
from harts_core.plan.bundle import CONSUMER, PlanBundle
from harts_core.plan.report import check_references
from harts_core.plan.schedule.check import check_schedule
from harts_core.plan.schedule.pipeline import DEFAULT_LAG, SCHEDULES, ScheduleKind, pipeline_schedule
from harts_core.plan.schedule.timeline import Pass, Timeline, simulate
from harts_core.plan.validate.failure import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaTimeline:
    """One replica's pipeline under one schedule.

    Attributes:
        replica: its index.
        makespan: when its last pass ends, in the cost model's unit.
        bubble_share: 1 − Σ busy / (stages · makespan).
        busy: for each stage the time in passes.
        peak_producers: for each stage the most producers alive at once.
        peak_interface_tokens: for each stage the most computed tokens alive at once of units that others
            import from.
        peak_activation_tokens: for each stage the most padded tokens alive at once of all units.
    """

    replica: int
    makespan: float
    bubble_share: float
    busy: tuple[float, ...]
    peak_producers: tuple[int, ...]
    peak_interface_tokens: tuple[int, ...]
    peak_activation_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleReport:
    """One kind of schedule on all replicas.

    Attributes:
        kind: of the schedule.
        makespan: of the slowest replica.
        slowdown: makespan over that of the schedule ``harts``.
        bubble_share: of the slowest replica.
        replicas: one entry each.
        passes: of the replica that is drawn, stage after stage.
    """

    kind: ScheduleKind
    makespan: float
    slowdown: float
    bubble_share: float
    replicas: tuple[ReplicaTimeline, ...]
    passes: tuple[Pass, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineReport:
    """Schedules of a plan on a pipeline.

    Attributes:
        planner: of the plan.
        stages: P.
        lag: consumer forwards by which a stage's backwards lag behind the next stage's.
        slots, windows: of the plan.
        cost_model: name of the plan's cost model.
        work: passes of the busiest replica, over P: no schedule takes less.
        replica: the one that is drawn.
        producers, consumers: its unit ids.
        schedules: one entry each.
    """

    planner: str
    stages: int
    lag: int
    slots: int
    windows: int
    cost_model: str
    work: float
    replica: int
    producers: tuple[int, ...]
    consumers: tuple[int, ...]
    schedules: tuple[ScheduleReport, ...]


def pipeline_report(
    bundle: PlanBundle,
    *,
    num_stages: int,
    kinds: Sequence[ScheduleKind] = SCHEDULES,
    replica: int | None = None,
    lag: int = DEFAULT_LAG,
    max_live_producers: int | None = None,
) -> PipelineReport:
    """Make, check and simulate schedules of all replicas.

    Args:
        bundle: a plan, checked or not.
        num_stages: P.
        kinds: which schedules.
        replica: the one to draw; the slowest of the first kind if not given.
        lag, max_live_producers: see :func:`pipeline_schedule`.

    Raises:
        InvalidPlanError: a table refers to something that does not exist, or a cost is not a number.
        ConfigError: no such replica, or a limit that the plan cannot meet.
    """
    check_references(bundle)
    u = bundle.units
    for name in ("cost_forward", "cost_backward"):
        cost = getattr(u, name)
        require(np.isfinite(cost) & (cost >= 0), f"{name} is not a number ≥ 0", lambda i: f"unit {i}")
    if replica is not None and not 0 <= replica < bundle.dp:
        raise ConfigError(f"there is no replica {replica}: the plan has {bundle.dp}", where="--replica")
    lines: dict[ScheduleKind, list[Timeline]] = {}
    for kind in dict.fromkeys((SCHEDULES[0], *kinds)):
        lines[kind] = []
        for d in range(bundle.dp):
            schedule = pipeline_schedule(
                bundle,
                num_stages=num_stages,
                replica=d,
                kind=kind,
                lag=lag,
                max_live_producers=max_live_producers,
            )
            check_schedule(bundle, schedule)
            lines[kind].append(simulate(bundle, schedule))
    spans = {kind: [line.makespan for line in found] for kind, found in lines.items()}
    shown = int(np.argmax(spans[kinds[0]])) if replica is None else replica
    mine = bundle.units_of_replica(shown)
    work = np.bincount(u.replica, u.cost_forward + u.cost_backward, minlength=bundle.dp)
    return PipelineReport(
        planner=bundle.planner,
        stages=num_stages,
        lag=lag,
        slots=int(u.slot.max()) + 1,
        windows=len(bundle.windows),
        cost_model=str(bundle.cost_model.get("name", "")),
        work=float(work.max()) / num_stages,
        replica=shown,
        producers=tuple(mine[u.kind[mine] != CONSUMER].tolist()),
        consumers=tuple(mine[u.kind[mine] == CONSUMER].tolist()),
        schedules=tuple(
            ScheduleReport(
                kind=kind,
                makespan=max(spans[kind]),
                slowdown=max(spans[kind]) / max(spans[SCHEDULES[0]]) if max(spans[SCHEDULES[0]]) else 1.0,
                bubble_share=lines[kind][int(np.argmax(spans[kind]))].bubble_share,
                replicas=tuple(_replica(d, line) for d, line in enumerate(lines[kind])),
                passes=lines[kind][shown].passes,
            )
            for kind in kinds
        ),
    )


def _replica(replica: int, line: Timeline) -> ReplicaTimeline:
    return ReplicaTimeline(
        replica=replica,
        makespan=line.makespan,
        bubble_share=line.bubble_share,
        busy=line.busy,
        peak_producers=line.peak_producers,
        peak_interface_tokens=line.peak_interface_tokens,
        peak_activation_tokens=line.peak_activation_tokens,
    )
