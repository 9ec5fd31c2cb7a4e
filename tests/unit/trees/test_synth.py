"""Synthetic workloads: what every kind promises, checked on the rows themselves."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from harts_core.errors import ConfigError
from harts_core.trees.build import Trajectory, build_tree
from harts_core.trees.synth import KINDS, ROW_SCHEMA, generate, workload_spec, write_rows
from harts_core.trees.synth.rollouts import DUMMY, MESSAGE_START, SUMMARY, THINK_END, THINK_START
from tests.support import naive_lcp


def rows_of(kind: str, **options: object) -> list[Trajectory]:
    return list(generate(workload_spec(kind=kind, **options)))  # type: ignore[arg-type]


def by_rollout(rows: list[Trajectory]) -> dict[str, list[Trajectory]]:
    result: dict[str, list[Trajectory]] = {}
    for row in rows:
        result.setdefault(row.trajectory_id.split("#")[0], []).append(row)
    return result


def trie_tokens(rows: list[Trajectory]) -> int:
    """Sorted rows, common prefixes found by halving: not how HARTS does it."""
    keys = sorted(r.tokens.astype(">i4").tobytes() for r in rows)
    total = len(keys[0])
    for a, b in itertools.pairwise(keys):
        low, high = 0, min(len(a), len(b)) // 4
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if a[: 4 * middle] == b[: 4 * middle] else (low, middle - 1)
        total += len(b) - 4 * low
    return total // 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_makes_consistent_rows(kind: str) -> None:
    rows = rows_of(kind, rows=150, seed=3)
    assert len(rows) == 150
    assert len({r.trajectory_id for r in rows}) == 150
    for row in rows:
        assert row.tokens.dtype == np.int32
        assert row.tokens.min() >= 0
        assert row.tokens.max() < 512
        assert len(row.tokens) <= 400
        assert row.loss_spans[0][0] >= 1
        assert row.loss_spans[-1][1] <= len(row.tokens)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(row.loss_spans.tolist()))
        assert len(row.old_logprobs) == sum(b - a for a, b in row.loss_spans)
        assert np.all(row.old_logprobs <= 0)
        assert np.isfinite([row.reward, row.advantages[0]]).all()
        assert (row.step is None) == (kind in ("trajectory", "tree"))
        assert (len(row.loss_spans) == 1) or row.step is None
    again = rows_of(kind, rows=150, seed=3)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(rows, again, strict=True))
    assert [float(r.advantages[0]) for r in rows] == [float(r.advantages[0]) for r in again]
    other = rows_of(kind, rows=150, seed=4)
    assert not np.array_equal(rows[0].tokens, other[0].tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_have_another_advantage(kind: str) -> None:
    rows = rows_of(kind, rows=300)
    groups: dict[bytes, list[Trajectory]] = {}
    for row in rows:
        groups.setdefault(row.tokens.tobytes(), []).append(row)
    pairs = [g for g in groups.values() if len(g) > 1]
    assert pairs
    for group in pairs:
        assert len({float(r.advantages[0]) for r in group}) == len(group)
        assert len({r.old_logprobs.tobytes() for r in group}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_some_rows_are_prefixes_and_forks_lie_inside_turns(kind: str) -> None:
    rows = sorted(rows_of(kind, rows=120), key=lambda r: (r.group_id, r.tokens.tolist()))
    prefixes = inside = 0
    for one, other in itertools.pairwise(rows):
        if one.group_id != other.group_id:
            continue
        a, b = one.tokens.tolist(), other.tokens.tolist()
        n = naive_lcp(a, b)
        prefixes += n == len(a) < len(b)
        inside += n < len(a) and MESSAGE_START not in a[n - 4 : n + 1]  # past the header and first token
    assert inside
    if kind != "step-no-think":  # removing the thinking makes every later turn fork off
        assert prefixes


def test_one_system_prompt_for_all_tasks_steps_and_kinds() -> None:
    first = [rows_of(kind, step=step)[0].tokens for kind in KINDS for step in (0, 1)]
    assert len({t[:62].tobytes() for t in first}) == 1  # 57 tokens of text, 5 of markup
    a, b = rows_of("step", step=0)[0].tokens, rows_of("step", step=1)[0].tokens
    assert naive_lcp(a.tolist(), b.tolist()) < 70


def test_step_rows_are_append_only() -> None:
    for steps in by_rollout(rows_of("step", rows=100)).values():
        for a, b in itertools.pairwise(steps):
            assert a.step is not None
            assert b.step is not None
            assert a.step < b.step
            assert np.array_equal(a.tokens, b.tokens[: len(a.tokens)])


def without_thinking(row: Trajectory) -> list[int]:
    """A row with every thinking part but the last removed."""
    tokens = row.tokens.tolist()
    keep_from = max(i for i, t in enumerate(tokens) if t == THINK_START)
    result, skipping = [], False
    for i, token in enumerate(tokens):
        skipping = skipping or (token == THINK_START and i < keep_from)
        if not skipping:
            result.append(token)
        if token == THINK_END:
            skipping = False
    return result


def test_no_think_rows_are_the_step_rows_without_earlier_thinking() -> None:
    steps, bare = rows_of("step", rows=80), rows_of("step-no-think", rows=80)
    for a, b in zip(steps, bare, strict=True):
        assert a.trajectory_id == b.trajectory_id
        assert without_thinking(a) == b.tokens.tolist()
        assert np.array_equal(a.old_logprobs, b.old_logprobs)
        (start, stop), (start_bare, stop_bare) = *a.loss_spans, *b.loss_spans
        assert np.array_equal(a.tokens[start:stop], b.tokens[start_bare:stop_bare])


def test_summaries_replace_the_history_and_later_steps_append_to_them() -> None:
    marker = [MESSAGE_START, SUMMARY]
    appended = 0
    for steps in by_rollout(rows_of("step-summary", rows=100)).values():
        texts = [r.tokens.tolist() for r in steps]
        summaries = [
            tuple(t[i:] for i in range(len(t) - 1) if t[i : i + 2] == marker) for t in texts
        ]  # at most one in a row
        for (a, b), (m, n) in zip(itertools.pairwise(texts), itertools.pairwise(summaries), strict=True):
            assert len(n) <= 1
            if m and naive_lcp(m[0], n[0]) > 4:  # the same summary
                assert b[: len(a)] == a
                appended += 1
    assert appended


def test_tree_step_rows_end_in_distinct_turns_except_for_duplicates() -> None:
    rows = [r for r in rows_of("tree-step", rows=200) if "-twin" not in r.trajectory_id]
    assert len({r.tokens.tobytes() for r in rows}) == len(rows)


def test_advantages_are_group_relative_with_each_rollout_once() -> None:
    spec = replace(workload_spec(kind="trajectory", rows=80), duplicate=0.0, interrupt=0.0)
    rows = list(generate(spec))
    for _, members in itertools.groupby(rows, key=lambda r: r.group_id):
        group = list(members)
        reward = np.array([r.reward for r in group])
        expected = (reward - reward.mean()) / (reward.std() + 1e-6)
        np.testing.assert_allclose([float(r.advantages[0]) for r in group], expected, rtol=1e-6)
    for steps in by_rollout(rows_of("step", rows=80)).values():
        assert len({float(r.advantages[0]) for r in steps}) == 1
        assert len({r.reward for r in steps}) == len(steps)


@pytest.mark.parametrize("kind", ["tree", "step-no-think"])
def test_length_scale_inserts_dummies_after_every_token(kind: str) -> None:
    for row, scaled in zip(rows_of(kind, rows=20), rows_of(kind, rows=20, length_scale=3), strict=True):
        assert np.array_equal(scaled.tokens[::3], row.tokens)
        assert np.all(scaled.tokens[1::3] == DUMMY)
        assert np.all(scaled.tokens[2::3] == DUMMY)
        assert scaled.loss_spans.tolist() == [[3 * a, 3 * b] for a, b in row.loss_spans]
        assert np.array_equal(scaled.old_logprobs, np.repeat(row.old_logprobs, 3))


@pytest.mark.parametrize("seed", range(4))
def test_tiny_tree_step_is_small_and_shares(seed: int) -> None:
    rows = rows_of("tree-step", seed=seed)
    tokens = sum(len(r.tokens) for r in rows)
    assert len(rows) == 48
    assert 2 <= len({r.group_id for r in rows}) <= 4
    assert tokens / trie_tokens(rows) >= 3


@pytest.mark.parametrize("seed", [0, 1])
def test_paper_preset_has_the_shape_of_a_training_step(seed: int) -> None:
    rows = rows_of("tree-step", preset="paper", seed=seed)
    lengths = np.array([len(r.tokens) for r in rows])
    assert len(rows) == 1617
    assert lengths.sum() == pytest.approx(43_503_482, rel=0.01)
    assert lengths.max() <= 64_000
    assert 7.3 < lengths.sum() / trie_tokens(rows) < 8.2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kind": "chain"}, "kind"),
        ({"preset": "huge"}, "preset"),
        ({"rows": 0}, "rows"),
        ({"seed": -1}, "seed"),
        ({"step": -1}, "step"),
        ({"vocab_size": 10}, "vocab_size"),
        ({"vocab_size": 2**31 + 1}, "vocab_size"),
        ({"length_scale": 0}, "length_scale"),
        ({"length_scale": 10**7}, "length_scale"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        workload_spec(**options)  # type: ignore[arg-type]
    assert caught.value.where == field


def test_the_file_holds_the_rows_and_is_the_same_every_time(tmp_path: Path) -> None:
    spec = workload_spec(kind="tree", rows=30)
    summary = write_rows(tmp_path / "a.parquet", spec)
    write_rows(tmp_path / "b.parquet", spec)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.remove_metadata().equals(ROW_SCHEMA)
    assert json.loads(table.schema.metadata[b"harts"])["vocab_size"] == 512
    rows = list(generate(spec))
    for stored, row in zip(table.to_pylist(), rows, strict=True):
        assert stored["tokens"] == row.tokens.tolist()
        assert [[s["start"], s["stop"]] for s in stored["loss_spans"]] == row.loss_spans.tolist()
        assert np.array_equal(np.array(stored["old_logprobs"], np.float32), row.old_logprobs)
        assert np.float32(stored["advantage"]) == row.advantages[0]
        for name in ("trajectory_id", "group_id", "step", "policy_version"):
            assert stored[name] == getattr(row, name)
    assert summary.tokens == sum(len(r.tokens) for r in rows)
    assert summary.trained_positions == sum(len(r.old_logprobs) for r in rows)
    assert summary.tasks == len({r.group_id for r in rows})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]


def test_the_trajectories_build_a_tree_in_memory() -> None:
    rows = rows_of("tree-step")
    tree = build_tree(rows)
    assert tree.num_rows == len(rows)
    assert tree.trie_tokens == trie_tokens(rows)


def test_rows_are_streamed_in_groups(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", workload_spec(kind="trajectory", rows=40, length_scale=1000))
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    assert metadata.num_row_groups > 1
    assert metadata.num_rows == 40


@pytest.mark.parametrize(
    ("field", "bounds"),
    [
        ("action_tokens", (2, 9)),
        ("action_tokens", (9, 8)),
        ("rollouts", (0, 2)),
        ("expansions", (-1, 0)),
        ("summary_every", (0, 3)),
        ("summary_tokens", (4, 3)),
    ],
)
def test_bad_ranges_are_named(field: str, bounds: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"{field} is") as caught:
        replace(workload_spec(), **{field: bounds})
    assert caught.value.where == field


@pytest.mark.parametrize("kind", KINDS)
def test_actions_may_be_as_short_as_their_markup(kind: str) -> None:
    spec = replace(workload_spec(kind=kind, rows=40), action_tokens=(3, 3), think_share=0.1, echo=1.0)
    rows = list(generate(spec))
    assert len(rows) == 40
    assert all(THINK_START in row.tokens for row in rows if kind in ("trajectory", "tree"))
