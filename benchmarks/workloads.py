"""The workloads that the throughput benchmarks share: the paper's shapes, shortened, and real rollouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harts_core.trees.build import Trajectory, build_tree
from harts_core.trees.ingest import ingest
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import LengthRange, WorkloadSpec, workload_spec


def shortened_workload(kind: str, *, rows: int, shorter: int, vocab_size: int, seed: int = 0) -> RolloutTree:
    """A ``paper`` workload with every length divided by ``shorter``: the same turns, branches and rows.

    The chunk length has to shrink with it (64 tokens of a 27,000-token row are 2 of an 840-token one) for
    replay and rounds to weigh what they weigh at full length; the benchmarks use 16.
    """
    paper = workload_spec(kind=kind, preset="paper", rows=rows, seed=seed, vocab_size=vocab_size)
    return build_tree(generate(shorten(paper, shorter)))


def shorten(spec: WorkloadSpec, shorter: int) -> WorkloadSpec:
    """A workload's specification with every length divided by ``shorter``."""

    def short(tokens: float, least: int = 2) -> int:
        return max(least, round(tokens / shorter))

    def short_range(lengths: LengthRange) -> LengthRange:
        return replace(
            lengths,
            minimum=short(lengths.minimum),
            median=lengths.median / shorter,
            maximum=short(lengths.maximum),
        )

    return replace(
        spec,
        max_length=short(spec.max_length),
        mean_length=None if spec.mean_length is None else short(spec.mean_length),
        system_tokens=short(spec.system_tokens),
        task_tokens=short_range(spec.task_tokens),
        action_tokens=(short(spec.action_tokens[0], 4), short(spec.action_tokens[1], 4)),
        observation_tokens=short_range(spec.observation_tokens),
        echo_tokens=max(1.0, spec.echo_tokens / shorter),
        summary_tokens=(short(spec.summary_tokens[0]), short(spec.summary_tokens[1])),
    )


def real_rollouts(file: Path, groups: tuple[str, ...]) -> RolloutTree:
    """All trajectories of some prompt groups of a rollout file, whole, with a vocabulary of their own.

    Token ids are renumbered in order of first appearance: the tree is the same, and a small model's head
    does not have to have the tokenizer's 150,000 rows.
    """
    tree, _ = ingest([file])
    missing = set(groups) - set(tree.group_id)
    if missing:
        raise SystemExit(f"{file} has no group {', '.join(sorted(missing))}")
    rows = [row for row in range(tree.num_rows) if tree.group_id[row] in groups]
    _, tokens = np.unique(np.concatenate([tree.tokens(row) for row in rows]), return_inverse=True)
    ends = np.cumsum(tree.length[rows])

    def column(values: Ragged | None, row: int) -> npt.NDArray[np.float32] | None:
        return None if values is None else values[row]

    return build_tree(
        Trajectory(
            trajectory_id=tree.trajectory_id[row],
            group_id=tree.group_id[row],
            tokens=tokens[end - tree.length[row] : end].astype(np.int32),
            loss_spans=tree.loss_spans[row].reshape(-1, 2),
            advantages=column(tree.advantages, row),
        )
        for row, end in zip(rows, ends.tolist(), strict=True)
    )
