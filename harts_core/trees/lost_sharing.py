"""Where rows that should share tokens part instead: retokenised histories, dropped thinking, edited prompts.

Two exact definitions, both on the finished tree:

``step``: rows a, b of one rollout with consecutive step indices present (a the earlier; of several branches
    the one that b shares most with). A step's context is everything before it, so a should be a prefix of b
    (or b of a). They lose sharing when they part before either ends; lost tokens = min(length) − LCP.
``prompt``: neighbouring rows of one group, both without a step index, that part before either has a trained
    position. Rows of a group answer one prompt; lost tokens = min(first trained position) − LCP.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.trees.neighbours import range_minimum
from harts_core.trees.rollout_tree import RolloutTree

NUM_EXAMPLES = 5
CONTEXT_BEFORE, CONTEXT_AFTER = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSharingExample:
    """One pair of rows that part.

    Attributes:
        kind: "step" or "prompt".
        group_id, first_id, second_id: the rows.
        position: first token position at which they differ.
        lost_tokens: tokens that are computed twice because of it.
        context_start: token position of the first id shown.
        first_tokens, second_tokens: token ids around ``position`` in both rows.
    """

    kind: str
    group_id: str
    first_id: str
    second_id: str
    position: int
    lost_tokens: int
    context_start: int
    first_tokens: tuple[int, ...]
    second_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSharing:
    """Totals of a tree and its worst pairs (most lost tokens first)."""

    step_pairs: int
    step_tokens: int
    prompt_pairs: int
    prompt_tokens: int
    examples: tuple[LostSharingExample, ...]


def find_lost_sharing(tree: RolloutTree, rollout_ids: Sequence[str]) -> LostSharing:
    """Every pair that loses sharing, by the definitions of this module.

    Args:
        tree: the tree.
        rollout_ids: N names, the rollout of each row.
    """
    found: dict[str, tuple[npt.NDArray[np.int64], ...]] = {}
    stepwise = _stepwise(tree)
    a, b = _step_pairs(tree, rollout_ids, stepwise)
    shared = _shared_tokens(tree, np.minimum(a, b), np.maximum(a, b))
    found["step"] = _lossy(a, b, shared, np.minimum(tree.length[a], tree.length[b]) - shared)
    a, b = _neighbours_in_groups(tree, np.flatnonzero(~stepwise))
    shared = _shared_tokens(tree, a, b)
    first = _first_trained(tree)
    found["prompt"] = _lossy(a, b, shared, np.minimum(first[a], first[b]) - shared)
    worst = sorted(
        (
            (-int(lost), kind, int(i), int(j), int(at))
            for kind, columns in found.items()
            for i, j, at, lost in zip(*columns, strict=True)
        ),
    )[:NUM_EXAMPLES]
    return LostSharing(
        step_pairs=len(found["step"][0]),
        step_tokens=int(found["step"][3].sum()),
        prompt_pairs=len(found["prompt"][0]),
        prompt_tokens=int(found["prompt"][3].sum()),
        examples=tuple(_example(tree, kind, i, j, at, -lost) for lost, kind, i, j, at in worst),
    )


def _shared_tokens(
    tree: RolloutTree, i: npt.NDArray[np.int64], j: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """int64, LCP of rows i < j, elementwise."""
    return np.asarray(range_minimum(tree.lcp, i + 1, j + 1), np.int64)


def _neighbours_in_groups(
    tree: RolloutTree, rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pairs (i, j), i < j, of the given rows that are next to each other in their group's sorted order."""
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(tree.group_id[r], len(numbers)) for r in rows.tolist()], np.int64)
    order = np.argsort(codes, kind="stable")
    same = codes[order][1:] == codes[order][:-1]
    ordered = rows[order]
    return ordered[:-1][same], ordered[1:][same]


def _stepwise(tree: RolloutTree) -> npt.NDArray[np.bool_]:
    if tree.step is None:
        return np.zeros(tree.num_rows, np.bool_)
    return np.ones(tree.num_rows, np.bool_) if tree.step_valid is None else tree.step_valid


def _step_pairs(
    tree: RolloutTree, rollout_ids: Sequence[str], stepwise: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Every row with the row of the step before that it shares most with: a neighbour in token order."""
    steps: dict[tuple[str, str], dict[int, list[int]]] = {}
    index = np.zeros(tree.num_rows, np.int32) if tree.step is None else tree.step
    for row in np.flatnonzero(stepwise).tolist():
        rollout = steps.setdefault((tree.group_id[row], rollout_ids[row]), {})
        rollout.setdefault(int(index[row]), []).append(row)
    before: list[npt.NDArray[np.int64]] = [np.empty((0, 3), np.int64)]
    for rollout in steps.values():
        for earlier, later in itertools.pairwise(sorted(rollout)):
            a, b = np.array(rollout[earlier]), np.array(rollout[later])
            at = np.searchsorted(a, b)
            before.append(np.stack([a[np.maximum(at - 1, 0)], a[np.minimum(at, len(a) - 1)], b], 1))
    left, right, b = np.concatenate(before).T
    nearer = _parted(tree, left, b) <= _parted(tree, right, b)
    return np.where(nearer, left, right), b


def _parted(tree: RolloutTree, a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64, tokens of the shorter row that the other does not share, elementwise."""
    shared = _shared_tokens(tree, np.minimum(a, b), np.maximum(a, b))
    return np.asarray(np.minimum(tree.length[a], tree.length[b]) - shared, np.int64)


def _lossy(a: Any, b: Any, shared: Any, lost: Any) -> tuple[npt.NDArray[np.int64], ...]:
    at = np.flatnonzero(lost > 0)
    return a[at], b[at], shared[at], lost[at]


def _first_trained(tree: RolloutTree) -> npt.NDArray[np.int64]:
    """int64 [N], the first trained position; the length where there is none."""
    first = tree.length.astype(np.int64)
    some = np.flatnonzero(tree.loss_spans.lengths)
    first[some] = tree.loss_spans.values[tree.loss_spans.offsets[some]]
    return first


def _example(tree: RolloutTree, kind: str, a: int, b: int, position: int, lost: int) -> LostSharingExample:
    start = max(0, position - CONTEXT_BEFORE)

    def tokens(row: int) -> tuple[int, ...]:
        stop = min(int(tree.length[row]), position + CONTEXT_AFTER)
        return tuple(tree.tokens(row, start, stop).tolist())

    return LostSharingExample(
        kind=kind,
        group_id=tree.group_id[a],
        first_id=tree.trajectory_id[a],
        second_id=tree.trajectory_id[b],
        position=position,
        lost_tokens=lost,
        context_start=start,
        first_tokens=tokens(a),
        second_tokens=tokens(b),
    )
