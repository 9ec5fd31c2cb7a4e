"""Tree statistics against plain counting over whole token lists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harts_core.trees.build import build_tree
from harts_core.trees.neighbours import neighbour_lcp
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.statistics import duplicate_rows, prefix_rows, tree_statistics
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import KINDS, workload_spec
from tests.support import naive_lcp, random_sequences, tree_from_sequences


def prefixes(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    """Every non-empty prefix that some sequence has."""
    return {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}


def random_tree(seed: int) -> tuple[RolloutTree, list[list[int]], list[str]]:
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, num_rows=25, vocab=4, max_extend=12, duplicates=0.2, prefixes=0.2)
    groups = [f"g{i}" for i in rng.integers(0, 3, len(sequences))]
    return tree_from_sequences(sequences, groups=groups, vocab=4), sequences, groups


def matched(sequences: list[list[int]], groups: list[str]) -> float:
    """Tokens that a cache of everything before finds, row by row; as a share of all."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    hits = 0
    for sequence, group in zip(sequences, groups, strict=True):
        paths = [(group, tuple(sequence[: i + 1])) for i in range(len(sequence))]
        hits += sum(path in seen for path in paths)
        seen |= set(paths)
    return hits / sum(map(len, sequences))


def test_prefix_match_rate_of_every_kind_of_sampling() -> None:
    """As in psRL's Table 1: step-wise samples match more than whole ones, branching more than independent
    ones, and an edited history (thinking removed, summaries) loses some of it."""
    rate = {}
    for kind in KINDS:
        rows = list(generate(workload_spec(kind=kind, rows=60, seed=3)))
        statistics = tree_statistics(build_tree(rows, {"sampling": kind}))
        assert statistics.sampling == kind
        rate[kind] = statistics.prefix_match_rate
        tokens = [row.tokens.tolist() for row in rows]
        assert rate[kind] == pytest.approx(matched(tokens, ["all"] * len(rows)))
        assert statistics.group_prefix_match_rate == pytest.approx(
            matched(tokens, [row.group_id for row in rows])
        )
    assert rate["trajectory"] < rate["tree"] < rate["step"] < rate["tree-step"]
    assert rate["trajectory"] < rate["step-no-think"] < rate["step"]
    assert rate["trajectory"] < rate["step-summary"] < rate["step"]


@pytest.mark.parametrize("seed", range(8))
def test_counts_equal_plain_counting(seed: int) -> None:
    tree, sequences, groups = random_tree(seed)
    statistics = tree_statistics(tree, chunks=(1, 4))
    trie = prefixes(sequences)
    assert statistics.rows == len(sequences)
    assert statistics.tokens == sum(map(len, sequences))
    assert statistics.trie_tokens == len(trie)
    assert statistics.compression == statistics.tokens / len(trie)
    assert statistics.trained_positions == sum(len(s) - 1 for s in sequences)
    assert statistics.duplicates == len(sequences) - len(set(map(tuple, sequences)))
    whole = set(map(tuple, sequences))
    assert statistics.prefix_rows == sum(
        any(tuple(s) == other[: len(s)] and len(other) > len(s) for other in whole) for s in sequences
    )
    children: dict[tuple[int, ...], int] = {}
    for path in trie:
        children[path[:-1]] = children.get(path[:-1], 0) + 1
    forks = {path: n for path, n in children.items() if n > 1 and path}
    assert statistics.forks == len(forks)
    assert statistics.max_fanout == max(forks.values(), default=1)
    assert statistics.roots == children[()]
    assert statistics.segments == children[()] + sum(forks.values())
    assert statistics.max_depth == 1 + max(sum(path[:i] in forks for i in range(len(path))) for path in trie)
    assert statistics.fork_position.count == len(forks)
    assert statistics.chunks[1].forks_on_boundary == sum(len(path) % 4 == 0 for path in forks)
    assert statistics.chunks[0].trie_tokens == len(trie)
    for group in statistics.per_group:
        mine = [s for s, g in zip(sequences, groups, strict=True) if g == group.group_id]
        assert (group.rows, group.tokens) == (len(mine), sum(map(len, mine)))
        assert group.trie_tokens == len(prefixes(mine))
    assert statistics.group_trie_tokens == sum(g.trie_tokens for g in statistics.per_group)
    assert statistics.prefix_match_rate == pytest.approx(matched(sequences, ["all"] * len(sequences)))
    assert statistics.group_prefix_match_rate == pytest.approx(matched(sequences, groups))
    assert [g.tokens for g in statistics.per_group] == sorted(
        (g.tokens for g in statistics.per_group), reverse=True
    )


@pytest.mark.parametrize("seed", range(4))
def test_whole_chunk_sharing_equals_a_trie_of_blocks(seed: int) -> None:
    tree, sequences, _ = random_tree(seed)
    statistics = tree_statistics(tree, chunks=(4,))
    blocks = {tuple(s[: i + 4]) for s in sequences for i in range(0, len(s) - 3, 4)}
    tails = sum(len(s) % 4 for s in sequences)  # partial blocks are never shared
    assert statistics.chunks[0].trie_tokens == 4 * len(blocks) + tails


def test_marks_of_duplicates_and_prefixes() -> None:
    tree = tree_from_sequences([[1], [1], [1, 2], [1, 2], [1, 2, 3], [1, 3], [2]])
    assert duplicate_rows(tree).tolist() == [False, True, False, True, False, False, False]
    assert prefix_rows(tree).tolist() == [True, True, True, True, False, False, False]


def test_step_wise_rows_of_one_rollout_count_once() -> None:
    tree = tree_from_sequences([[1], [1, 2], [1, 2, 3], [4]])
    ids = ("a#0", "a#1", "b#7", "c")
    step = np.array([0, 1, 3, 0], np.int32)
    valid = np.array([True, True, True, False])
    tree = replace(tree, trajectory_id=ids, step=step, step_valid=valid)
    assert tree_statistics(tree).distinct_trajectories == 3  # a; b#7, whose ending is not its step; c


def test_a_tree_without_forks() -> None:
    statistics = tree_statistics(tree_from_sequences([[1, 2, 3]]))
    assert (statistics.forks, statistics.max_fanout, statistics.max_depth) == (0, 0, 1)
    assert statistics.fork_position.count == 0
    assert statistics.lcp.count == 0
    assert statistics.chunks[0].fraction == 0.0


def test_metrics_are_the_single_numbers() -> None:
    metrics = tree_statistics(tree_from_sequences([[1, 2], [1, 3]])).metrics
    assert metrics["compression"] == 4 / 3
    assert set(metrics) >= {"rows", "tokens", "trie_tokens", "group_compression", "duplicates"}
    assert "length" not in metrics
    assert "content_sha256" not in metrics


def test_neighbour_lcp_of_subsets_equals_comparing_tokens() -> None:
    tree, _, _ = random_tree(5)
    rng = np.random.default_rng(0)
    tokens = tree.all_tokens()
    for _ in range(50):
        rows = np.flatnonzero(rng.random(tree.num_rows) < 0.4)
        first = rng.random(len(rows)) < 0.2
        first[:1] = True
        expected = [
            0 if start else naive_lcp(tokens[int(rows[k - 1])].tolist(), tokens[int(row)].tolist())
            for k, (row, start) in enumerate(zip(rows, first, strict=True))
        ]
        assert neighbour_lcp(tree.lcp, rows, first).tolist() == expected
