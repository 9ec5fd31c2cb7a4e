"""The segment tree against a brute-force trie of sets."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.trees.segments import build_segment_tree
from tests.support import naive_lcp

Rows = list[tuple[int, ...]]


def brute_force_segments(rows: Rows) -> set[tuple[int, tuple[int, ...]]]:
    """{(start, path up to the segment's stop)} by walking every fork-free run of the set of prefixes."""
    children: dict[tuple[int, ...], set[int]] = {}
    for row in rows:
        for i in range(len(row)):
            children.setdefault(row[:i], set()).add(row[i])
    segments = set()
    for parent, tokens in children.items():
        if parent == () or len(tokens) > 1:
            for token in tokens:
                path = (*parent, token)
                while len(children.get(path, ())) == 1:
                    path = (*path, *children[path])
                segments.add((len(parent), path))
    return segments


rows_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=12
)


@settings(max_examples=500, deadline=None)
@given(rows_strategy)
def test_equals_brute_force(rows: Rows) -> None:
    rows = sorted(rows)
    length = np.array([len(r) for r in rows])
    lcp = np.array([0] + [naive_lcp(a, b) for a, b in itertools.pairwise(rows)])
    tree = build_segment_tree(length, lcp)
    found = {(int(a), rows[r][:b]) for a, b, r in zip(tree.start, tree.stop, tree.row, strict=True)}
    assert found == brute_force_segments(rows)
    assert len(found) == len(tree)
    assert tree.num_tokens == int((length - lcp).sum())
    for v, p in enumerate(tree.parent):
        if p < 0:
            assert tree.start[v] == 0
        else:
            assert p < v
            assert tree.stop[p] == tree.start[v]
            assert rows[tree.row[p]][: tree.stop[p]] == rows[tree.row[v]][: tree.start[v]]
    for i, v in enumerate(tree.row_segment):
        assert tree.start[v] < length[i] <= tree.stop[v]
        assert rows[tree.row[v]][: length[i]] == rows[i]
