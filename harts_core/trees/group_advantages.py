"""Group-relative advantages from rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from harts_core.errors import DataError
from harts_core.trees.findings import Findings
from harts_core.trees.rollout_tree import RolloutTree

EPSILON = 1e-6
AdvantageKind = Literal["grpo", "dr_grpo"]
ADVANTAGE_KINDS: tuple[AdvantageKind, ...] = get_args(AdvantageKind)


def group_relative_advantages(
    tree: RolloutTree, rollout_ids: Sequence[str], findings: Findings, kind: AdvantageKind = "grpo"
) -> npt.NDArray[np.float32]:
    """A = (r − mean) / (std + 1e-6) over the rollouts of a group, one value per row.

    Every rollout counts once, however many step-wise rows or branches it has; all its rows get its
    advantage. Its reward is that of its last step (a warning counts rollouts whose rows differ). The
    standard deviation is the population's; with ``dr_grpo`` nothing is divided by it.

    Args:
        tree: rows with rewards.
        rollout_ids: N names, the rollout of each row.
        findings: receives the warning.
        kind: ``grpo`` or ``dr_grpo``.

    Returns:
        float32 [N].

    Raises:
        DataError: a row has no reward.
    """
    reward = tree.reward
    missing = np.arange(tree.num_rows) if reward is None else np.flatnonzero(np.isnan(reward))
    if reward is None or len(missing):
        raise DataError(
            f"--advantages {kind} needs a reward on every row",
            where=f"trajectory {tree.trajectory_id[int(missing[0])]}",
            hint="name the reward field with --map reward=NAME",
        )
    last: dict[tuple[str, str], tuple[int, float]] = {}  # (group, rollout) → (step, reward)
    differing: set[tuple[str, str]] = set()
    keys = list(zip(tree.group_id, rollout_ids, strict=True))
    for row, key in enumerate(keys):
        step = -1 if tree.step is None else int(tree.step[row])
        entry = (step, float(reward[row]))
        if key in last and last[key][1] != entry[1]:
            differing.add(key)
        last[key] = max(last.get(key, entry), entry)
    if differing:
        first = min(differing)[1]
        findings.warn(
            "advantages: rows of one rollout have different rewards; the last step's counts",
            first,
            len(differing),
        )
    groups: dict[str, list[float]] = {}
    for (group, _), (_, value) in sorted(last.items()):
        groups.setdefault(group, []).append(value)
    mean = {g: float(np.mean(v)) for g, v in groups.items()}
    scale = {g: float(np.std(v)) + EPSILON if kind == "grpo" else 1.0 for g, v in groups.items()}
    return np.array([(last[k][1] - mean[k[0]]) / scale[k[0]] for k in keys], np.float32)
