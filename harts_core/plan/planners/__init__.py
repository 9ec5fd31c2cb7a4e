"""All planners, behind one protocol and in one list. Every plan of any of them can be executed."""

from __future__ import annotations

from harts_core.plan.planners.expanded import plan_expanded
from harts_core.plan.planners.group_prefix import plan_group_prefix
from harts_core.plan.planners.harts_l1 import plan_harts_l1
from harts_core.plan.planners.length_balanced import plan_length_balanced
from harts_core.plan.planners.one_sided import plan_balance_first, plan_prefix_first
from harts_core.plan.planners.ortools_ffd import plan_ortools_ffd
from harts_core.plan.planners.problem import Planner, PlanProblem
from harts_core.plan.planners.psrl import plan_psrl
from harts_core.plan.planners.two_level.planner import plan_harts

__all__ = ["PLANNERS", "TOKEN_WISE_PLANNERS", "WHOLE_ROW_PLANNERS", "PlanProblem", "Planner"]


PLANNERS: dict[str, Planner] = {
    "harts": plan_harts,
    "harts-l1": plan_harts_l1,
    "ortools-ffd": plan_ortools_ffd,
    "psrl": plan_psrl,
    "prefix-first": plan_prefix_first,
    "balance-first": plan_balance_first,
    "group-prefix": plan_group_prefix,
    "length-balanced": plan_length_balanced,
    "expanded": plan_expanded,
}

TOKEN_WISE_PLANNERS = ("psrl",)
"""Planners that split trajectories by themselves."""
WHOLE_ROW_PLANNERS = ("group-prefix", "length-balanced", "expanded")
"""Planners in whose plans a trajectory cannot be split: they do not share by prefix trees."""
