"""What a training step or a forward pass asks of the other processes, and the answers of a single one.

The caller runs its own replicas' units and asks for sums over the ranks; it does not know how many there
are. ``harts_core.exec.parallel.grid`` has the answers of many processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from harts_core.exec.model.spec import WHOLE_MODEL, Stage
from harts_core.plan.schedule.pipeline import DEFAULT_LAG, ScheduleKind, pipeline_schedule
from harts_core.plan.schedule.units import Event, UnitLinks, unit_events, unit_links

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.model.moe_losses import RouterSums
    from harts_core.exec.optimizer import StepOptimizer
    from harts_core.exec.parallel.unit_pipe import Transfers
    from harts_core.plan.bundle import PlanBundle


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalWork:
    """The units that a rank runs in a step.

    Attributes:
        bundle: the plan.
        links: who imports from whom.
        units: unit ids in forward order, for each replica.
        lockstep: other ranks run the same events with other units, so every backward goes through all layers.
        stage: which stage of a pipeline the rank is.
        schedule, lag, max_live_producers: of the pipeline, see ``pipeline_schedule``.
        transfers: with the stages before and after; None: the model is whole.
    """

    bundle: PlanBundle
    links: UnitLinks
    units: dict[int, tuple[int, ...]]
    lockstep: bool = False
    stage: Stage = WHOLE_MODEL
    schedule: ScheduleKind = "harts"
    lag: int = DEFAULT_LAG
    max_live_producers: int | None = None
    transfers: Transfers | None = None

    @property
    def num_units(self) -> int:
        """Units of all the rank's replicas."""
        return sum(map(len, self.units.values()))

    def events(self, *, training: bool = True) -> tuple[Event, ...]:
        """What to run, in order: replica after replica."""
        return tuple(event for replica in self.units for event in self._events(replica, training))

    def _events(self, replica: int, training: bool) -> tuple[Event, ...]:
        units = self.units[replica]
        if self.stage.count == 1:
            return unit_events(self.links, units, training=training)
        schedule = pipeline_schedule(
            self.bundle,
            num_stages=self.stage.count,
            replica=replica,
            kind=self.schedule,
            units=units,
            links=self.links,
            lag=self.lag,
            max_live_producers=self.max_live_producers,
            training=training,
        )
        return schedule.stages[self.stage.index]


@dataclass(slots=True)
class StepSums:
    """A step's loss and metrics as they add up.

    Attributes:
        objective_loss, router_loss: sums of the units' parts.
        metrics: name to [total, count].
    """

    objective_loss: float = 0.0
    router_loss: float = 0.0
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def add_metric(self, name: str, total: float, count: float) -> None:
        """Add to a metric's sums."""
        sums = self.metrics.setdefault(name, [0.0, 0.0])
        sums[0] += total
        sums[1] += count

    @property
    def loss(self) -> float:
        """The whole loss."""
        return self.objective_loss + self.router_loss

    def means(self) -> dict[str, float]:
        """Every metric's mean; without those of count 0."""
        return {name: total / count for name, (total, count) in self.metrics.items() if count}


class Ranks(Protocol):
    """The processes that share a training step. Every method is called by all of them, in the same order."""

    @property
    def name(self) -> str:
        """Of this process, for messages; empty where it is the only one."""

    def at(self, event: str) -> None:
        """This process goes on to an event: named if a process of the job is lost."""

    def work(self, bundle: PlanBundle, units: Sequence[int]) -> LocalWork:
        """What this process runs of some units of a plan, given replica after replica, in forward order."""

    def sum_values(self, values: Tensor) -> Tensor:
        """The sum over all ranks of what each found, zeros elsewhere; the same on every rank.

        The tensor-parallel ranks of a replica's last stage find the same: one of them counts.
        """

    def sum_step(self, sums: StepSums) -> StepSums:
        """The step's loss and metrics over all ranks."""

    def sum_router(self, sums: RouterSums | None, shape: tuple[int, int]) -> RouterSums | None:
        """Router statistics of this rank's layers over all ranks. Shape: layers with experts, experts."""

    def router_metrics(self, sums: RouterSums | None) -> dict[str, float]:
        """``RouterSums.metrics`` of all layers, from what ``sum_router`` gave; empty without experts."""

    def finish_gradients(self, optimizer: StepOptimizer) -> float:
        """Sum the gradients over the ranks, in place; their global norm."""


class OneProcess:
    """A single process runs all replicas, one after another."""

    name = ""

    def at(self, event: str) -> None:
        """Nobody else waits."""

    def work(self, bundle: PlanBundle, units: Sequence[int]) -> LocalWork:
        """All units."""
        replica = bundle.units.replica
        mine = {d: tuple(u for u in units if replica[u] == d) for d in range(bundle.dp)}
        return LocalWork(bundle=bundle, links=unit_links(bundle), units=mine)

    def sum_values(self, values: Tensor) -> Tensor:
        """They are complete."""
        return values

    def sum_step(self, sums: StepSums) -> StepSums:
        """They are complete."""
        return sums

    def sum_router(self, sums: RouterSums | None, shape: tuple[int, int]) -> RouterSums | None:
        """They are complete."""
        return sums

    def router_metrics(self, sums: RouterSums | None) -> dict[str, float]:
        """This process has all layers."""
        return {} if sums is None else sums.metrics()

    def finish_gradients(self, optimizer: StepOptimizer) -> float:
        """They are complete."""
        return optimizer.finish_gradients()


ONE_PROCESS = OneProcess()
"""The default."""
