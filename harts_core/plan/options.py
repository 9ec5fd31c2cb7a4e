"""The options of planning, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from harts_core.errors import ConfigError
from harts_core.plan.cost_model import DEFAULT_COST_MODEL, PRESETS, CostModel

ON_TOO_LONG = ("error", "drop", "split")
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan for; with the rollout tree it determines the plan's bytes.

    Attributes:
        dp: D, data-parallel replicas.
        capacity: T, compact tokens that a consumer may hold.
        planner: a name of ``harts_core.plan.planners.PLANNERS``.
        pad: A, computed tokens are rounded up to a multiple of it.
        chunk: B, chunk length of the linear-attention kernel.
        seed: of randomised searches.
        cost_model: coefficients of unit costs.
        producer_capacity: tokens that a producer may compute; None: the capacity.
        max_live_producers: producers that may be alive at once on a replica.
        max_window_slots: slots that may share an inner producer; None: any number (planner harts).
        effort: rounds of search; more rounds, better plans (planner harts).
        time_budget_s: seconds to add further whole rounds in; the plan states how many ran as its effort.
        search_budget: deterministic seconds that OR-Tools may search each shard (planner ortools-ffd); 0: up
            to its first solution.
        on_too_long: trajectories longer than the capacity: "error", "drop" (recorded) or "split".
    """

    dp: int
    capacity: int
    planner: str = "harts"
    pad: int = 1
    chunk: int = 64
    seed: int = 0
    cost_model: CostModel = field(default_factory=lambda: PRESETS[DEFAULT_COST_MODEL])
    producer_capacity: int | None = None
    max_live_producers: int = 2
    max_window_slots: int | None = None
    effort: int = 2
    time_budget_s: float = 0.0
    search_budget: float = 1.0
    on_too_long: str = "error"

    def __post_init__(self) -> None:
        names = ["dp", "capacity", "pad", "chunk", "producer_capacity", "max_live_producers"]
        for name in (*names, "max_window_slots", "effort"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_TOKENS:
                raise ConfigError(f"{name} must be a positive integer up to {MAX_TOKENS}, not {value}")
        for name in ("time_budget_s", "search_budget"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number of seconds, not {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must lie in [0, 2^32), not {self.seed}")
        if self.on_too_long not in ON_TOO_LONG:
            raise ConfigError(f"on_too_long must be one of {', '.join(ON_TOO_LONG)}, not {self.on_too_long}")
