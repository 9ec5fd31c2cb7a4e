"""TreeBuilder against plain Python sorting, for any order of input and any number of merged runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_core.errors import DataError
from harts_core.trees.build import Trajectory, TreeBuilder, build_tree
from harts_core.trees.rollout_tree import RolloutTree
from tests.support import naive_lcp, random_sequences, tree_from_sequences


def make(
    i: int, tokens: list[int], rng: np.random.Generator, name: str | None = None, with_ref: bool = True
) -> Trajectory:
    spans = [(1, len(tokens))] if len(tokens) > 1 else []
    n = max(0, len(tokens) - 1)
    return Trajectory(
        trajectory_id=name or f"t{i:05d}",
        group_id="g0",
        tokens=np.array(tokens, np.int32),
        loss_spans=np.array(spans, np.int32),
        old_logprobs=-rng.random(n),
        ref_logprobs=-rng.random(n) if with_ref else None,
        advantages=rng.standard_normal(1),
        reward=float(rng.random()),
    )


def build(rows: list[Trajectory], buffer_tokens: int, duplicate_ids: str = "error") -> RolloutTree:
    builder = TreeBuilder(buffer_tokens=buffer_tokens, duplicate_ids=duplicate_ids)  # type: ignore[arg-type]
    for row in rows:
        builder.add(row)
    tree = builder.finish({"vocab_size": 50})
    names = [rows[i].trajectory_id for i in builder.order]
    assert all(new.startswith(old) for new, old in zip(tree.trajectory_id, names, strict=True))
    return tree


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 40),
    vocab=st.integers(1, 50),
    num_roots=st.integers(1, 4),
    buffer_tokens=st.sampled_from([1, 7, 64, 300, 10**6]),
)
def test_equals_plain_sorting(
    seed: int, num_rows: int, vocab: int, num_roots: int, buffer_tokens: int
) -> None:
    rng = np.random.default_rng(seed)
    sequences = random_sequences(
        rng, num_rows=num_rows, vocab=vocab, num_roots=num_roots, duplicates=0.2, prefixes=0.2
    )
    rows = [make(i, tokens, rng) for i, tokens in enumerate(sequences)]
    expected = tree_from_sequences(sequences)
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    tree = build(shuffled, buffer_tokens)
    assert tree.trajectory_id == expected.trajectory_id
    assert tree.length.tolist() == expected.length.tolist()
    assert tree.lcp.tolist() == expected.lcp.tolist()
    assert tree.suffix.values.tolist() == expected.suffix.values.tolist()
    assert tree.loss_spans.values.tolist() == expected.loss_spans.values.tolist()
    by_id = {row.trajectory_id: row for row in rows}
    assert tree.old_logprobs is not None
    assert tree.reward is not None
    for i, name in enumerate(tree.trajectory_id):
        assert tree.tokens(i).tolist() == by_id[name].tokens.tolist()
        np.testing.assert_array_equal(tree.old_logprobs[i], by_id[name].old_logprobs)
        assert tree.reward[i] == np.float32(by_id[name].reward)
    assert build(rows, 10**6).content_sha256 == tree.content_sha256


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), buffer_tokens=st.sampled_from([5, 10**6]))
def test_suffixed_ids_do_not_depend_on_the_order_of_input(seed: int, buffer_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, num_rows=15, vocab=3, duplicates=0.5, max_extend=4)
    names = [["a", "a~2", "b"][rng.integers(3)] for _ in sequences]
    rows = [
        make(i, tokens, rng, name, with_ref=bool(rng.integers(2)))
        for i, (tokens, name) in enumerate(zip(sequences, names, strict=True))
    ]
    hashes = set()
    for _ in range(3):
        tree = build([rows[i] for i in rng.permutation(len(rows))], buffer_tokens, "suffix")
        assert len(set(tree.trajectory_id)) == len(rows)
        hashes.add(tree.content_sha256)
    assert len(hashes) == 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_long_shared_prefixes_and_large_ids(seed: int) -> None:
    """LCPs around the 32-token comparison block, and ids up to the largest int32."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 2**31, 200).tolist()
    sequences = [
        prompt[: rng.integers(1, 201)] + rng.integers(0, 2**31, rng.integers(0, 3)).tolist()
        for _ in range(20)
    ]
    rows = [make(i, tokens, rng) for i, tokens in enumerate(sequences)]
    tree = build_tree(rows)
    ordered = sorted(sequences)
    assert [tree.tokens(i).tolist() for i in range(20)] == ordered
    assert tree.lcp[1:].tolist() == [naive_lcp(a, b) for a, b in itertools.pairwise(ordered)]


def test_duplicate_id_is_refused(rng: np.random.Generator) -> None:
    with pytest.raises(DataError, match="'t00000' appears twice"):
        build_tree([make(0, [1, 2], rng), make(0, [1, 3], rng)])


def test_suffixes_skip_taken_names(rng: np.random.Generator) -> None:
    rows = [make(0, [1, 2], rng, "a"), make(1, [1, 2], rng, "a"), make(2, [1, 2], rng, "a~2")]
    assert build(rows, 100, "suffix").trajectory_id == ("a", "a~2", "a~3")


def test_nothing_added_is_refused() -> None:
    with pytest.raises(DataError, match="no trajectories"):
        build_tree([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "tokens must be a non-empty"),
        ({"tokens": [1, -2, 3]}, "negative token id -2"),
        ({"tokens": [1, 2**40, 3]}, "tokens must hold 32-bit integers"),
        ({"tokens": [1.0, 2.0, 3.0]}, "tokens must hold 32-bit integers"),
        ({"loss_spans": [(0, 2)]}, "loss_spans must be sorted"),
        ({"loss_spans": [(1, 4)]}, "loss_spans must be sorted"),
        ({"loss_spans": [(2, 3), (1, 2)]}, "loss_spans must be sorted"),
        ({"old_logprobs": [-1.0]}, "old_logprobs has 1 values for 2 trained positions"),
        ({"ref_logprobs": [-1.0, float("nan")]}, "ref_logprobs is not finite"),
        ({"advantages": [1.0, 2.0, 3.0]}, "advantages has 3 values for 2"),
        ({"reward": float("inf")}, "reward is not finite"),
        ({"reward": 1e300}, "reward is not finite"),
        ({"advantages": [1e300]}, "advantages is not finite"),
        ({"loss_spans": [1, 2, 3]}, "loss_spans must hold start, stop pairs"),
        ({"step": 2**31}, "step 2147483648 does not fit"),
    ],
)
def test_trajectory_checks_itself(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"tokens": [1, 2, 3], "loss_spans": [(1, 3)]}
    with pytest.raises(DataError, match=message) as error:
        Trajectory(trajectory_id="x", group_id="g", **(fields | change))  # type: ignore[arg-type]
    assert error.value.where == "trajectory x"
