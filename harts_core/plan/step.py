"""One training step from rollouts in memory: for frameworks that hold them, and write no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harts_core.plan.bundle import PlanBundle
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.progress import Progress, no_progress
from harts_core.trees.build import Trajectory, build_tree
from harts_core.trees.rollout_tree import RolloutTree


def plan_step(
    trajectories: Iterable[Trajectory],
    options: PlanOptions,
    *,
    metadata: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
) -> tuple[RolloutTree, PlanBundle]:
    """Merge trajectories into a rollout tree and plan it: ``harts ingest`` and ``harts plan`` in memory.

    Example::

        tree, plan = plan_step(trajectories, PlanOptions(dp=1, capacity=65_536))
        trainer.step(plan, tree)

    Args:
        trajectories: in any order; the result does not depend on it.
        options: what to plan for.
        metadata: ``vocab_size``, ``tokenizer``, … for the tree.
        progress: told about the planner's search.

    Returns:
        The tree, whose rows are in its own order (``tree.trajectory_id`` names them), and the validated plan.

    Raises:
        DataError: no trajectories, two of one id, or a token id not below ``metadata["vocab_size"]``.
        ConfigError, InfeasiblePlanError: as ``plan_tree``.
    """
    tree = build_tree(trajectories, metadata)
    return tree, plan_tree(tree, options, progress)
