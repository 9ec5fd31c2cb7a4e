"""What ingest found: sizes, sharing, duplicates, lost sharing, what was dropped and what is doubtful."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harts_core.trees.findings import Finding, Findings
from harts_core.trees.lost_sharing import LostSharing, find_lost_sharing
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.segments import build_segment_tree
from harts_core.trees.statistics import GroupStatistics, duplicate_rows, group_statistics, prefix_rows


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
    groups: tuple[GroupStatistics, ...]
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
    groups = group_statistics(tree)
    singleton = _num_singleton_groups(tree, rollout_ids)
    if singleton == len(groups) > 1:
        findings.warn(
            "every group has one rollout; name the group field with --group-key, or use --group-size",
            groups[0].group_id,
            singleton,
        )
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
        duplicates=int(duplicate_rows(tree).sum()),
        prefix_rows=int(prefix_rows(tree).sum()),
        roots=int((segments.parent < 0).sum()),
        forks=len(set(segments.parent[segments.parent >= 0].tolist())),
        lost_sharing=find_lost_sharing(tree, rollout_ids),
        dropped=findings.dropped,
        warnings=findings.warnings,
        content_sha256=tree.content_sha256,
    )


def _num_stepwise(tree: RolloutTree) -> int:
    if tree.step is None:
        return 0
    return tree.num_rows if tree.step_valid is None else int(tree.step_valid.sum())


def _num_singleton_groups(tree: RolloutTree, rollout_ids: Sequence[str]) -> int:
    rollouts = Counter(group for group, _ in set(zip(tree.group_id, rollout_ids, strict=True)))
    return sum(count == 1 for count in rollouts.values())
