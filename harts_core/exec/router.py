"""A step's router: its losses unit by unit, and the statistics of all its units.

The formulas are in ``harts_core.exec.model.moe_losses``. The balance loss needs the expert loads of the whole
step before the first backward, so they are counted by a forward-only pass over the same units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts_core.exec.blocks import CacheSettings
from harts_core.exec.config import LinearCalls
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.model.moe_losses import RouterSums, RouterTerms, router_losses, router_sums
from harts_core.exec.model.spec import ModelSpec
from harts_core.exec.parallel.ranks import ONE_PROCESS, LocalWork, Ranks
from harts_core.exec.step_data import StepData
from harts_core.exec.windows import UnitExecutor, UnitForward


class StepRouter:
    """Collects the routing of a step's units; each is shown once, right after its forward.

    Args:
        terms: weights of the router's losses.
        spec: of the model: a rank has the routing of its rows only.
        original_tokens: S of the step, all replicas.
        load: f of the whole step, [L, E]; None where the balance loss has no weight.

    Attributes:
        sums: over the units shown so far on this rank; None before the first, and without experts.
    """

    def __init__(
        self, terms: RouterTerms, spec: ModelSpec, original_tokens: int, load: Tensor | None
    ) -> None:
        self.terms, self.spec = terms, spec
        self.original_tokens, self.load = original_tokens, load
        self.sums: RouterSums | None = None

    @classmethod
    def begin(
        cls,
        model: HybridModel,
        data: StepData,
        work: LocalWork,
        terms: RouterTerms,
        *,
        linear_calls: LinearCalls = "rounds",
        ranks: Ranks = ONE_PROCESS,
        cache: CacheSettings = CacheSettings(),
    ) -> StepRouter:
        """The router of a step on a model, the loads counted if they are needed."""
        load = None
        if terms.balance_loss_coef > 0 and model.config.has_experts:
            counting = cls(RouterTerms(), model.spec, data.original_tokens, None)
            events = work.events(training=False)
            executor = UnitExecutor(
                model,
                work.bundle,
                data.tree,
                counting.loss,
                events,
                linear_calls=linear_calls,
                links=work.links,
                cache=cache,
                transfers=work.transfers,
            )
            for event in events:
                ranks.at(f"the expert loads, {event.kind} of unit {event.unit}")
                executor.run(event)
            sums = ranks.sum_router(counting.sums, model.routed_shape)
            load = None if sums is None else sums.load  # a stage of a pipeline may have none
        return cls(terms, model.spec, data.original_tokens, load)

    def loss(self, forward: UnitForward) -> Tensor | None:
        """A unit's share of the router's losses; None where there is none."""
        if not forward.routing:
            return None
        occurrences = torch.as_tensor(forward.layout.occurrences, device=forward.hidden.device)
        occurrences = self.spec.local_rows(occurrences)
        found = router_sums(forward.routing, occurrences)
        self.sums = found if self.sums is None else self.sums + found
        if not self.terms.has_loss:
            return None
        return router_losses(
            forward.routing, occurrences, self.terms, original_tokens=self.original_tokens, load=self.load
        )
