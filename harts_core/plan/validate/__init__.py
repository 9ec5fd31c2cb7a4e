"""The independent validator: every plan of every planner passes it before it is written or executed.

It reads the tables and the rollout tree and shares no code with the planners: token paths are compared
through the tree's own lcp column, token counts, costs, metrics and bounds are computed anew.
"""

from __future__ import annotations

from harts_core.errors import InvalidPlanError
from harts_core.plan.bundle import PlanBundle
from harts_core.plan.validate.assignments import check_assignments
from harts_core.plan.validate.calls import check_calls
from harts_core.plan.validate.manifest import check_manifest
from harts_core.plan.validate.metrics import check_metrics
from harts_core.plan.validate.paths import TokenPaths
from harts_core.plan.validate.spans import check_spans
from harts_core.plan.validate.units import check_units
from harts_core.plan.validate.work import check_work
from harts_core.trees.rollout_tree import RolloutTree

__all__ = ["validate_plan"]


def validate_plan(bundle: PlanBundle, tree: RolloutTree) -> None:
    """Check every rule of DESIGN §3 (feasibility) and §5 (tables) against the rollout tree.

    Args:
        bundle: the plan; its tables may hold anything.
        tree: the rollout tree it was made for, itself checked.

    Raises:
        InvalidPlanError: the first broken rule, naming the unit, span, sequence or row; or the plan was
            made for another tree.
    """
    if bundle.tree_sha256 != tree.content_sha256:
        raise InvalidPlanError(
            "the plan was made for another rollout tree",
            where=f"plan: {bundle.tree_sha256[:12]}…, tree: {tree.content_sha256[:12]}…",
            hint="give the rollout-tree file that the plan was made from, or plan again",
        )
    check_manifest(bundle, tree)
    check_units(bundle)
    paths = TokenPaths(tree)
    check_spans(bundle, tree, paths)
    check_assignments(bundle, tree, paths)
    check_work(bundle)
    check_calls(bundle)
    check_metrics(bundle, tree)
