"""All planners, behind one protocol and in one list. Every plan of any of them can be executed."""

from __future__ import annotations

from harts_core.plan.planners.expanded import plan_expanded
from harts_core.plan.planners.harts_l1 import plan_harts_l1
from harts_core.plan.planners.problem import Planner, PlanProblem
from harts_core.plan.planners.two_level.planner import plan_harts

__all__ = ["PLANNERS", "PlanProblem", "Planner"]

PLANNERS: dict[str, Planner] = {
    "harts": plan_harts,
    "harts-l1": plan_harts_l1,
    "expanded": plan_expanded,
}
