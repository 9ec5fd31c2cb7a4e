"""The workloads that benchmarks share: the paper's shapes, shortened; four agents' shapes; real rollouts."""

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


def agent_workloads(rows: int, seed: int) -> dict[str, WorkloadSpec]:
    """One workload for each of psRL's four agents, each sampled in its own way.

    Short whole trajectories (search), steps over long pages with the whole history (web), many short steps
    without earlier thinking (house), steps of branching rollouts (network). All lengths are chosen here.
    """

    def paper(kind: str) -> WorkloadSpec:
        spec = workload_spec(kind=kind, preset="paper", rows=rows, seed=seed)
        return replace(spec, mean_length=None, rollouts=(8, 8), max_length=32_000)

    return {
        "search-agent": replace(
            paper("trajectory"),
            system_tokens=603,
            task_tokens=lengths(30, 90, 400, 0.5),
            action_tokens=(60, 260),
            observation_tokens=lengths(300, 900, 3_000, 0.5),
            turns=lengths(2, 4, 10, 0.4),
        ),
        "web-agent": replace(
            paper("step"),
            system_tokens=1_807,
            task_tokens=lengths(60, 150, 500, 0.5),
            action_tokens=(80, 350),
            observation_tokens=lengths(500, 2_000, 6_000, 0.6),
            turns=lengths(4, 9, 20, 0.4),
        ),
        "house-agent": replace(
            paper("step-no-think"),
            system_tokens=1_203,
            task_tokens=lengths(100, 250, 700, 0.5),
            action_tokens=(40, 180),
            observation_tokens=lengths(20, 60, 300, 0.6),
            turns=lengths(8, 20, 45, 0.35),
        ),
        "network-agent": replace(
            paper("tree-step"),
            system_tokens=3_009,
            task_tokens=lengths(300, 900, 3_000, 0.5),
            action_tokens=(150, 500),
            observation_tokens=lengths(200, 700, 2_500, 0.6),
            turns=lengths(5, 12, 30, 0.4),
            rollouts=(2, 3),
            expansions=(6, 10),
        ),
    }


def lengths(minimum: int, median: float, maximum: int, sigma: float) -> LengthRange:
    """Short for specifications."""
    return LengthRange(minimum=minimum, median=median, maximum=maximum, sigma=sigma)


def share_whole_blocks(tree: RolloutTree, block_tokens: int) -> RolloutTree:
    """The same rows, with tokens replaced so that they share only whole blocks of a fixed size.

    The first token of a block says which of the different blocks after the same path it is, so that two rows
    agree on a block or differ from its first token on. A row that is a prefix of another one still is.
    """
    known: dict[tuple[int, bytes], tuple[int, int]] = {}  # (path before, block) → (path with it, first token)
    followers: dict[int, int] = {}
    longer: list[tuple[int, int]] = []  # the blocks of the row after this one
    made: list[Trajectory] = []
    for row in reversed(range(tree.num_rows)):
        tokens = tree.tokens(row).copy()
        inside = row + 1 < tree.num_rows and tree.lcp[row + 1] == len(tokens)
        path = 0
        blocks: list[tuple[int, int]] = []
        for start in range(0, len(tokens), block_tokens):
            block = tokens[start : start + block_tokens]
            if inside and len(block) < block_tokens:
                path, first = longer[len(blocks)]
            else:
                key = (path, block.tobytes())
                if key not in known:
                    known[key] = (len(known) + 1, followers.get(path, 0))
                    followers[path] = known[key][1] + 1
                path, first = known[key]
            tokens[start] = first
            blocks.append((path, first))
        longer = blocks
        made.append(
            Trajectory(
                trajectory_id=tree.trajectory_id[row],
                group_id=tree.group_id[row],
                tokens=tokens,
                loss_spans=tree.loss_spans[row].reshape(-1, 2),
            )
        )
    return build_tree(made)


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
