"""A training step on many processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from harts_core.exec.model.moe_losses import RouterSums
from harts_core.exec.parallel.groups import Groups
from harts_core.exec.parallel.lockstep import lockstep_plan
from harts_core.exec.parallel.ranks import LocalWork, StepSums
from harts_core.exec.parallel.transfers import StageTransfers
from harts_core.plan.schedule.units import unit_links

if TYPE_CHECKING:
    from harts_core.exec.optimizer import StepOptimizer
    from harts_core.plan.bundle import PlanBundle

SUMMED_AT_ONCE = 8 << 20
"""Values of one reduction."""


class ProcessGrid:
    """The ranks of a job (``Ranks``).

    Args:
        groups: of this process.
        device: where tensors are reduced.
        at: told of every event.
    """

    def __init__(
        self, groups: Groups, device: torch.device, at: Callable[[str], None] = lambda event: None
    ) -> None:
        self.groups, self.device, self._at = groups, device, at
        self.transfers = StageTransfers(groups) if groups.stage.count > 1 else None

    @property
    def name(self) -> str:
        """Which rank this is."""
        return f"rank {self.groups.rank}"

    def at(self, event: str) -> None:
        """See ``Watch``."""
        self._at(event)

    def work(self, bundle: PlanBundle, units: Sequence[int]) -> LocalWork:
        """The units of this rank's replicas: a run of consecutive ones."""
        share = bundle.dp // self.groups.data.size()
        first = self.groups.data.rank() * share
        mine = range(first, first + share)
        parallel = self.groups.parallel
        links = unit_links(bundle)
        own = {d: tuple(u for u in units if bundle.units.replica[u] == d) for d in mine}
        lockstep = parallel.tp % parallel.ep != 0  # else experts are exchanged within a replica only
        if lockstep:
            plan = lockstep_plan(bundle, units)
            bundle, links = plan.bundle, plan.links
            own = {d: plan.units[d] for d in mine}
        return LocalWork(
            bundle=bundle,
            links=links,
            units=own,
            lockstep=lockstep,
            stage=self.groups.stage,
            schedule=parallel.schedule,
            lag=parallel.schedule_lag,
            max_live_producers=parallel.max_live_producers,
            transfers=self.transfers,
        )

    def sum_values(self, values: Tensor) -> Tensor:
        """In flat buffers, when all that this rank sent has arrived."""
        if self.transfers is not None:
            self.transfers.finish()
        total = torch.zeros_like(values, device=self.device)
        if self.groups.tensor.rank() == 0:
            total.copy_(values)
        for part in torch.split(total.view(-1), SUMMED_AT_ONCE):
            dist.all_reduce(part)
        return total.to(values.device)

    def sum_step(self, sums: StepSums) -> StepSums:
        """In rank order. All tensor-parallel ranks of a replica's last stage have its objective; every rank
        has the router loss of its own rows and layers."""
        tensor_parallel = self.groups.tensor.size()
        gathered: list[StepSums] = [StepSums()] * dist.get_world_size()
        dist.all_gather_object(gathered, sums)
        total = StepSums()
        for rank, part in enumerate(gathered):
            total.router_loss += part.router_loss
            if rank % tensor_parallel == 0:
                total.objective_loss += part.objective_loss
                for name, (metric, count) in part.metrics.items():
                    total.add_metric(name, metric, count)
        return total

    def sum_router(self, sums: RouterSums | None, shape: tuple[int, int]) -> RouterSums | None:
        """Counts are integers: their sums do not depend on the order."""
        if not shape[0]:
            return None
        counts = torch.zeros(shape, dtype=torch.int64, device=self.device)
        mass = torch.zeros(shape, dtype=torch.float64, device=self.device)
        z = torch.zeros(shape[0], dtype=torch.float64, device=self.device)
        tokens = torch.zeros(1, dtype=torch.int64, device=self.device)
        if sums is not None:
            counts += sums.counts
            mass += sums.mass
            z += sums.z
            tokens += sums.tokens
        for tensor in (counts, mass, z, tokens):
            dist.all_reduce(tensor, group=self.groups.tensor_and_data)
        return RouterSums(counts=counts, mass=mass, z=z, tokens=int(tokens))

    def router_metrics(self, sums: RouterSums | None) -> dict[str, float]:
        """Of the layers of all stages."""
        if sums is not None:  # on the host: a rank may not see the GPU of another
            sums = replace(sums, counts=sums.counts.cpu(), mass=sums.mass.cpu(), z=sums.z.cpu())
        stages: list[RouterSums | None] = [None] * self.groups.pipeline.size()
        dist.all_gather_object(stages, sums, group=self.groups.pipeline)
        found = [stage for stage in stages if stage is not None]
        if not found:
            return {}
        whole = RouterSums(
            counts=torch.cat([stage.counts for stage in found]),
            mass=torch.cat([stage.mass for stage in found]),
            z=torch.cat([stage.z for stage in found]),
            tokens=found[0].tokens,
        )
        return whole.metrics()

    def finish_gradients(self, optimizer: StepOptimizer) -> float:
        """When all that this rank sent has arrived."""
        if self.transfers is not None:
            self.transfers.finish()
        return optimizer.finish_gradients()
