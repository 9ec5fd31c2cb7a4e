"""What ingest found: sizes, sharing, duplicates, lost sharing, what was dropped and what is doubtful."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harts_core.trees.findings import Finding, Findings
from harts_core.trees.lcp_ranges import LcpRanges
from harts_core.trees.lost_sharing import (
    LostSharing,
    find_lost_sharing,
    group_codes,
    neighbours_in_groups,
)
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.segments import build_segment_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One group of the tree: its rows, tokens, and the tokens of its own trie."""

    group_id: str
    rows: int
    rollouts: int
    tokens: int
    trie_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestReport:
    """The result of an ingest, in the order it is shown.

    Attributes:
        sources: name, sha256 and records of every file.
        rows, tokens, trained_positions, max_tokens: sizes; tokens are the semantic positions S.
        trie_tokens: C(all).
        group_trie_tokens: tokens of the groups' tries, summed: the tree cut at group bounds.
        rollouts: distinct rollouts; ``stepwise_rows`` of the rows are steps of them.
        groups: every group, most tokens first.
        singleton_groups: groups of one rollout.
        duplicates: rows whose tokens equal an earlier row's.
        prefix_rows: rows that are a proper prefix of another row.
        roots, forks: first tokens in use; places where paths part.
        lost_sharing: see :mod:`harts_core.trees.lost_sharing`.
        dropped, warnings: reason → count and first place.
        content_sha256: of the tree.
    """

    sources: tuple[dict[str, Any], ...]
    rows: int
    tokens: int
    trained_positions: int
    max_tokens: int
    trie_tokens: int
    group_trie_tokens: int
    rollouts: int
    stepwise_rows: int
    groups: tuple[GroupReport, ...]
    singleton_groups: int
    duplicates: int
    prefix_rows: int
    roots: int
    forks: int
    lost_sharing: LostSharing
    dropped: dict[str, Finding]
    warnings: dict[str, Finding]
    content_sha256: str

    @property
    def compression(self) -> float:
        """Tokens over trie tokens."""
        return self.tokens / self.trie_tokens

    @property
    def group_compression(self) -> float:
        """Tokens over trie tokens with the tree cut at group bounds."""
        return self.tokens / self.group_trie_tokens

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, with the two compressions."""
        out = dataclasses.asdict(self)
        ratios = {"compression": self.compression, "group_compression": self.group_compression}
        return {**out, **{name: round(value, 4) for name, value in ratios.items()}}


def make_report(
    tree: RolloutTree,
    rollout_ids: Sequence[str],
    findings: Findings,
    sources: Sequence[dict[str, Any]],
) -> IngestReport:
    """The report of a finished tree.

    Args:
        tree: the tree.
        rollout_ids: N names, the rollout of each row.
        findings: drops and warnings so far; the report adds a warning when every group has one rollout.
        sources: name, sha256, records of every file read.
    """
    ranges = LcpRanges(tree.lcp)
    groups = _group_reports(tree, rollout_ids, ranges)
    singleton = sum(g.rollouts == 1 for g in groups)
    if singleton == len(groups) > 1:
        findings.warn(
            "every group has one rollout; name the group field with --group-key, or use --group-size",
            groups[0].group_id,
            singleton,
        )
    duplicate = np.zeros(tree.num_rows, np.bool_)
    duplicate[1:] = (tree.lcp[1:] == tree.length[1:]) & (tree.length[1:] == tree.length[:-1])
    segments = build_segment_tree(tree.length, tree.lcp)
    return IngestReport(
        sources=tuple(sources),
        rows=tree.num_rows,
        tokens=tree.original_tokens,
        trained_positions=int(tree.trained_counts.sum()),
        max_tokens=int(tree.length.max()),
        trie_tokens=tree.trie_tokens,
        group_trie_tokens=sum(g.trie_tokens for g in groups),
        rollouts=len(set(rollout_ids)),
        stepwise_rows=_num_stepwise(tree),
        groups=groups,
        singleton_groups=singleton,
        duplicates=int(duplicate.sum()),
        prefix_rows=_num_prefix_rows(tree, duplicate),
        roots=int((segments.parent < 0).sum()),
        forks=len(np.unique(segments.parent[segments.parent >= 0])),
        lost_sharing=find_lost_sharing(tree, rollout_ids, ranges),
        dropped=findings.dropped,
        warnings=findings.warnings,
        content_sha256=tree.content_sha256,
    )


def _num_stepwise(tree: RolloutTree) -> int:
    if tree.step is None:
        return 0
    return tree.num_rows if tree.step_valid is None else int(tree.step_valid.sum())


def _num_prefix_rows(tree: RolloutTree, duplicate: Any) -> int:
    """Rows that the next row of other tokens continues."""
    block = np.cumsum(~duplicate) - 1  # rows of equal tokens
    last = np.flatnonzero(np.append(~duplicate[1:], True))
    continued = np.zeros(len(last), np.bool_)
    continued[:-1] = tree.lcp[last[:-1] + 1] == tree.length[last[:-1]]
    return int(continued[block].sum())


def _group_reports(
    tree: RolloutTree, rollout_ids: Sequence[str], ranges: LcpRanges
) -> tuple[GroupReport, ...]:
    codes = group_codes(tree)
    names = list(dict.fromkeys(tree.group_id))
    length = tree.length.astype(np.int64)
    rows = np.bincount(codes)
    tokens = np.zeros(len(names), np.int64)
    np.add.at(tokens, codes, length)
    shared = np.zeros(len(names), np.int64)
    a, b = neighbours_in_groups(tree, np.arange(tree.num_rows))
    np.add.at(shared, codes[b], ranges.between(a, b))
    rollouts = np.zeros(len(names), np.int64)
    for code, _ in set(zip(codes.tolist(), rollout_ids, strict=True)):
        rollouts[code] += 1
    reports = [
        GroupReport(
            group_id=names[i],
            rows=int(rows[i]),
            rollouts=int(rollouts[i]),
            tokens=int(tokens[i]),
            trie_tokens=int(tokens[i] - shared[i]),
        )
        for i in range(len(names))
    ]
    return tuple(sorted(reports, key=lambda g: (-g.tokens, g.group_id)))
