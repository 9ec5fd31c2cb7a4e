"""What a rollout tree looks like: sharing, lengths, forks, and how far the forks miss the chunk grid."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.distribution import Distribution, describe
from harts_core.trees.neighbours import neighbour_lcp
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.segments import SegmentTree, build_segment_tree

CHUNKS = (16, 32, 64, 128)
"""Chunk lengths that ``tree_statistics`` reports by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStatistics:
    """One prompt group by itself: its rows, tokens, the tokens of its own trie, and their ratio."""

    group_id: str
    rows: int
    tokens: int
    trie_tokens: int
    compression: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStatistics:
    """Sharing if states could be handed over at chunk boundaries only.

    Attributes:
        chunk: B, the chunk length.
        forks_on_boundary: forks at a multiple of B; all others need replay.
        fraction: of the forks.
        trie_tokens: tokens of the trie when only whole chunks are shared,
            Σ (length − B·⌊lcp / B⌋).
        compression: tokens / trie_tokens.
    """

    chunk: int
    forks_on_boundary: int
    fraction: float
    trie_tokens: int
    compression: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeStatistics:
    """A rollout tree in numbers.

    Attributes:
        content_sha256: of the tree's content.
        rows: trajectories N.
        groups: distinct group_ids.
        distinct_trajectories: rollouts that the rows come from: ids of step-wise rows (``step`` not null)
            count once without their ``#<step>`` ending.
        tokens: S, token occurrences; trie_tokens: C(all); compression: S / C(all).
        group_trie_tokens: trie tokens with the tree cut at group bounds; group_compression: likewise.
        sampling: how the rollouts were sampled, as the tree says; None where it does not.
        prefix_match_rate: token occurrences whose token, with all tokens before it, an earlier row has, as a
            share of S: 1 − C(all) / S, the hits of a cache that keeps everything.
        group_prefix_match_rate: likewise, rows of the same group only.
        trained_positions: positions inside loss spans.
        duplicates: rows equal to an earlier row.
        prefix_rows: rows that are a proper prefix of another row.
        segments: fork-free token paths; roots: those that start at position 0.
        forks: segments with at least two children; max_fanout: the most children; max_depth: the most
            segments on one path.
        length: tokens of the rows; lcp: tokens shared with the row before (rows 1 …); fork_position: token
            positions of the forks.
        chunks: how the forks lie on chunk grids.
        per_group: every group, the one with most tokens first.
    """

    content_sha256: str
    rows: int
    groups: int
    distinct_trajectories: int
    tokens: int
    trie_tokens: int
    compression: float
    group_trie_tokens: int
    group_compression: float
    sampling: str | None
    prefix_match_rate: float
    group_prefix_match_rate: float
    trained_positions: int
    duplicates: int
    prefix_rows: int
    segments: int
    roots: int
    forks: int
    max_fanout: int
    max_depth: int
    length: Distribution
    lcp: Distribution
    fork_position: Distribution
    chunks: tuple[ChunkStatistics, ...]
    per_group: tuple[GroupStatistics, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """The single numbers by name, for limits such as ``--fail-under``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: v for name, v in values.items() if isinstance(v, int | float)}


def tree_statistics(tree: RolloutTree, chunks: tuple[int, ...] = CHUNKS) -> TreeStatistics:
    """Measure a rollout tree; O(N log N) in its rows, tokens are not read.

    Args:
        tree: the tree.
        chunks: chunk lengths to report, each ≥ 1.
    """
    tokens, trie_tokens = tree.original_tokens, tree.trie_tokens
    per_group = group_statistics(tree)
    group_trie_tokens = sum(g.trie_tokens for g in per_group)
    segments = build_segment_tree(tree.length, tree.lcp)
    children = np.bincount(segments.parent[segments.parent >= 0], minlength=len(segments))
    forks = segments.stop[children >= 2]
    return TreeStatistics(
        content_sha256=tree.content_sha256,
        rows=tree.num_rows,
        groups=len(per_group),
        distinct_trajectories=count_trajectories(tree),
        tokens=tokens,
        trie_tokens=trie_tokens,
        compression=tokens / trie_tokens,
        group_trie_tokens=group_trie_tokens,
        group_compression=tokens / group_trie_tokens,
        sampling=tree.metadata.get("sampling"),
        prefix_match_rate=1 - trie_tokens / tokens,
        group_prefix_match_rate=1 - group_trie_tokens / tokens,
        trained_positions=int(tree.trained_counts.sum()),
        duplicates=int(duplicate_rows(tree).sum()),
        prefix_rows=int(prefix_rows(tree).sum()),
        segments=len(segments),
        roots=int((segments.parent < 0).sum()),
        forks=len(forks),
        max_fanout=int(children.max(initial=0)),
        max_depth=int(_depths(segments).max(initial=0)),
        length=describe(tree.length),
        lcp=describe(tree.lcp[1:]),
        fork_position=describe(forks),
        chunks=tuple(_chunk_statistics(tree, forks, chunk) for chunk in chunks),
        per_group=per_group,
    )


def group_statistics(tree: RolloutTree) -> tuple[GroupStatistics, ...]:
    """Every group's own sharing (the tree cut at group bounds), the group with most tokens first."""
    names, group = np.unique(np.array(tree.group_id, dtype=object), return_inverse=True)
    rows = np.argsort(group, kind="stable")
    first = np.ones(len(rows), np.bool_)
    first[1:] = group[rows[1:]] != group[rows[:-1]]
    starts = np.flatnonzero(first)
    length = tree.length[rows].astype(np.int64)
    shared = neighbour_lcp(tree.lcp, rows, first)
    counts = np.diff(np.append(starts, len(rows)))
    tokens = np.add.reduceat(length, starts)
    trie_tokens = tokens - np.add.reduceat(shared.astype(np.int64), starts)
    order = np.lexsort((np.arange(len(names)), -tokens))
    return tuple(
        GroupStatistics(
            group_id=str(names[i]),
            rows=int(counts[i]),
            tokens=int(tokens[i]),
            trie_tokens=int(trie_tokens[i]),
            compression=float(tokens[i] / trie_tokens[i]),
        )
        for i in order.tolist()
    )


def duplicate_rows(tree: RolloutTree) -> npt.NDArray[np.bool_]:
    """bool [N], True where a row equals an earlier one (sorted: the row before it)."""
    same = np.zeros(tree.num_rows, np.bool_)
    same[1:] = (tree.lcp[1:] == tree.length[1:]) & (tree.length[1:] == tree.length[:-1])
    return same


def prefix_rows(tree: RolloutTree) -> npt.NDArray[np.bool_]:
    """bool [N], True where a row is a proper prefix of another one.

    In sorted order that row comes directly after it and its duplicates.
    """
    first = np.flatnonzero(~duplicate_rows(tree))  # the first row of every run of equal rows
    prefix = np.zeros(len(first), np.bool_)
    prefix[:-1] = tree.lcp[first[1:]] == tree.length[first[:-1]]
    return np.repeat(prefix, np.diff(np.append(first, tree.num_rows)))


def count_trajectories(tree: RolloutTree) -> int:
    """Distinct rollouts: step-wise rows (``step`` not null) count once per id without ``#<step>``."""
    if tree.step is None:
        return tree.num_rows
    valid = np.ones(tree.num_rows, np.bool_) if tree.step_valid is None else tree.step_valid
    names = zip(tree.trajectory_id, valid.tolist(), tree.step.tolist(), strict=True)
    return len({name.removesuffix(f"#{step}") if stepwise else name for name, stepwise, step in names})


def _chunk_statistics(tree: RolloutTree, forks: npt.NDArray[Any], chunk: int) -> ChunkStatistics:
    on_boundary = int((forks % chunk == 0).sum())
    shared = tree.lcp.astype(np.int64)
    trie_tokens = tree.original_tokens - int((shared - shared % chunk).sum())
    return ChunkStatistics(
        chunk=chunk,
        forks_on_boundary=on_boundary,
        fraction=on_boundary / len(forks) if len(forks) else 0.0,
        trie_tokens=trie_tokens,
        compression=tree.original_tokens / trie_tokens,
    )


def _depths(segments: SegmentTree) -> npt.NDArray[np.int64]:
    """int64 [V], segments on the path from the root, the segment itself included."""
    depth = np.ones(len(segments), np.int64)
    parents = segments.parent.tolist()
    for v, parent in enumerate(parents):  # parents come first
        if parent >= 0:
            depth[v] = depth[parent] + 1
    return depth
