"""Ingest of real rollouts: known totals, plain re-readings of the files as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from harts_core.trees.export import export_rows
from harts_core.trees.ingest import ingest
from harts_core.trees.ingest_options import IngestOptions
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import read_tree, write_tree


@pytest.mark.parametrize(
    ("name", "rows", "tokens", "trie_tokens", "group_trie_tokens", "rollouts", "duplicates"),
    [
        ("tau_bench_airline", 2454, 7_621_233, 545_729, 608_842, 200, 8),
        ("toolbench_dfs", 771, 703_259, 59_269, None, 156, 426),
        ("swe_agent", 230, 1_249_822, 165_289, None, 22, None),
    ],
)
def test_tokenized_step_wise_rows(
    shared_data: Path,
    tmp_path: Path,
    name: str,
    rows: int,
    tokens: int,
    trie_tokens: int,
    group_trie_tokens: int | None,
    rollouts: int,
    duplicates: int | None,
) -> None:
    path = shared_data / "tokenized" / f"{name}.step_wise.parquet"
    tree, report = ingest([path])
    assert (report.rows, report.tokens, report.trie_tokens) == (rows, tokens, trie_tokens)
    assert (report.rollouts, report.stepwise_rows) == (rollouts, rows)
    assert group_trie_tokens in (None, report.group_trie_tokens)
    assert duplicates in (None, report.duplicates)
    assert report.lost_sharing.step_pairs == 0
    assert not report.dropped
    assert tree.metadata["tokenizer"] == "qwen3"
    written = write_tree(tmp_path / "tree.arrow", tree)
    back = read_tree(tmp_path / "tree.arrow")
    assert back.content_sha256 == written.content_sha256 == tree.content_sha256
    check_against_source(back, path)


def check_against_source(tree: RolloutTree, path: Path) -> None:
    """Every token and metadata value of the file, found in the tree bit for bit."""
    index = {name: i for i, name in enumerate(tree.trajectory_id)}
    flat = tree.all_tokens()
    assert tree.step is not None
    assert tree.reward is not None
    assert tree.advantages is not None
    for batch in pq.ParquetFile(path).iter_batches(256):
        for source in batch.to_pylist():
            i = index.pop(f"{source['trajectory_id']}#{source['step_index']}")
            assert flat[i].tolist() == source["input_ids"]
            assert tree.group_id[i] == source["group_id"]
            assert tree.step[i] == source["step_index"]
            mask = np.zeros(len(source["input_ids"]), np.int64)
            mask[tree.trained_positions(i)] = 1
            assert mask.tolist() == source["loss_mask"]
            assert tree.reward[i] == np.float32(source["reward"])
            assert tree.advantages[i].tolist() == [np.float32(source["advantage"])]
    assert not index


def test_export_reads_back_to_the_same_content(shared_data: Path, tmp_path: Path) -> None:
    tree, _ = ingest([shared_data / "tokenized" / "toolbench_dfs.step_wise.parquet"])
    export_rows(tmp_path / "rows.parquet", tree)
    again, report = ingest([tmp_path / "rows.parquet"])
    assert again.content_sha256 == tree.content_sha256
    assert report.rollouts == 156


def test_atropos(shared_data: Path) -> None:
    path = shared_data / "atropos" / "rubiks_process_results_32.jsonl"
    tree, report = ingest([path])
    assert (report.rows, report.tokens, report.trie_tokens) == (24, 54_669, 8_800)
    assert len(report.groups) == 6
    expected = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        group = json.loads(line)
        for i in range(4):
            trained = [t for t, m in enumerate(group["masks"][i]) if m != -100]
            expected[f"{path.name}:{number}/{i}"] = (group["tokens"][i], trained, group["scores"][i])
    assert tree.reward is not None
    for i, name in enumerate(tree.trajectory_id):
        tokens, trained, score = expected[name]
        assert tree.tokens(i).tolist() == tokens
        assert tree.trained_positions(i).tolist() == trained
        assert tree.reward[i] == np.float32(score)


def verifiers_reference(path: Path) -> list[tuple[list[int], list[bool], list[float]]]:
    """(tokens, mask, logprobs) of every trace; the fixture's traces are single paths."""
    out = []
    for line in path.read_text().splitlines():
        for trace in json.loads(line)["traces"]:
            nodes = trace["nodes"]
            assert [n.get("parent", -1) for n in nodes] == list(range(-1, len(nodes) - 1))
            columns: list[list[Any]] = [[], [], []]
            for node in nodes:
                for column, key in zip(columns, ("token_ids", "mask", "logprobs"), strict=True):
                    column.extend(node[key])
            out.append((columns[0], columns[1], columns[2]))
    return out


def test_verifiers_traces(shared_data: Path) -> None:
    path = shared_data / "fixtures" / "verifiers_v1_traces.jsonl"
    tree, report = ingest([path])
    assert report.rows == 8
    assert {g.group_id: g.rows for g in report.groups} == {"g0": 4, "g2": 4}
    assert tree.policy_version is not None
    assert set(tree.policy_version.tolist()) == {7}
    assert tree.old_logprobs is not None
    expected = sorted(verifiers_reference(path))
    for i, (tokens, mask, logprobs) in enumerate(expected):
        assert tree.tokens(i).tolist() == tokens
        assert tree.trained_positions(i).tolist() == [t for t, m in enumerate(mask) if m]
        np.testing.assert_array_equal(tree.old_logprobs[i], np.array(logprobs, np.float32))


def test_nemo_rl_rows_are_prefixes_of_verifiers_paths(shared_data: Path) -> None:
    """Both files together: the four NeMo-RL rows add no token, and are trained at the same positions."""
    verifiers = shared_data / "fixtures" / "verifiers_v1_traces.jsonl"
    nemo = shared_data / "fixtures" / "nemo_rl_train_data_step1.jsonl"
    alone, _ = ingest([verifiers])
    tree, report = ingest([verifiers, nemo])
    assert report.rows == 12
    assert tree.trie_tokens == alone.trie_tokens
    assert report.prefix_rows == 4
    rows = [i for i, name in enumerate(tree.trajectory_id) if name.startswith(nemo.name)]
    assert len(rows) == 4
    for i in rows:
        assert tree.lcp[i + 1] == tree.length[i]  # the row after continues it
        longer = tree.trained_positions(i + 1)
        assert tree.trained_positions(i).tolist() == longer[longer < tree.length[i]].tolist()


def test_stepwise_rows_are_prefixes_of_verifiers_paths(shared_data: Path) -> None:
    steps = shared_data / "fixtures" / "stepwise_rows.jsonl"
    verifiers = shared_data / "fixtures" / "verifiers_v1_traces.jsonl"
    tree, report = ingest([steps])
    assert (report.rows, report.stepwise_rows, report.rollouts) == (60, 60, 4)
    assert report.lost_sharing.step_pairs == 0
    assert "airline/0/0#14" in tree.trajectory_id
    alone, _ = ingest([verifiers])
    both, _ = ingest([steps, verifiers])
    assert both.trie_tokens == alone.trie_tokens


def test_group_relative_advantages_equal_those_in_the_files(shared_data: Path) -> None:
    """tau-bench's step rows carry (r − mean) / (std + 1e-6) over the four trials of a task."""
    path = shared_data / "tokenized" / "tau_bench_airline.step_wise.parquet"
    given, _ = ingest([path])
    computed, _ = ingest([path], IngestOptions(advantages="grpo"))
    assert given.advantages is not None
    assert computed.advantages is not None
    np.testing.assert_allclose(computed.advantages.values, given.advantages.values, atol=1e-5)
    assert np.any(computed.advantages.values != 0)


def reference_rows(path: Path) -> dict[str, tuple[list[int], list[int]]]:
    """trajectory_id#step → (tokens, mask) of a tokenized file."""
    columns = ["trajectory_id", "step_index", "input_ids", "loss_mask"]
    return {
        f"{r['trajectory_id']}#{r['step_index']}": (r["input_ids"], r["loss_mask"])
        for r in pq.read_table(path, columns=columns).to_pylist()
    }


def tree_rows(tree: RolloutTree) -> dict[str, tuple[list[int], list[int]]]:
    out = {}
    for i, name in enumerate(tree.trajectory_id):
        mask = np.zeros(int(tree.length[i]), np.int64)
        mask[tree.trained_positions(i)] = 1
        out[name] = (tree.tokens(i).tolist(), mask.tolist())
    return out


def test_tau_bench_messages_render_to_the_tokenized_rows(shared_data: Path) -> None:
    """All 1,381 steps of tasks 0–24, rendered from text, equal the file tokenized by others."""
    pytest.importorskip("quicktok")
    options = IngestOptions(tokenizer="qwen3", sampling="step")
    tree, report = ingest([shared_data / "tau_bench" / "gpt-4o-airline.tasks00-24.json"], options)
    reference = reference_rows(shared_data / "tokenized" / "tau_bench_airline.step_wise.parquet")
    expected = {
        name.replace("airline/", "").replace("trial", ""): row
        for name, row in reference.items()
        if int(name.split("/")[1]) < 25
    }
    assert report.rows == len(expected) == 1381
    assert tree_rows(tree) == expected


def test_toolbench_search_tree_renders_to_the_tokenized_rows(shared_data: Path) -> None:
    pytest.importorskip("quicktok")
    name = "G3_answer__13_ChatGPT_DFS_woFilter_w2"
    options = IngestOptions(tokenizer="qwen3", sampling="step")
    tree, report = ingest([shared_data / "toolbench_dfs" / f"{name}.json"], options)
    reference = reference_rows(shared_data / "tokenized" / "toolbench_dfs.step_wise.parquet")
    expected = [row for key, row in reference.items() if key.startswith(name + "/")]
    assert report.rows == 193
    assert sorted(tree_rows(tree).values()) == sorted(expected)


def test_swe_agent_histories(shared_data: Path) -> None:
    pytest.importorskip("quicktok")
    options = IngestOptions(tokenizer="qwen3", sampling="step")
    _, report = ingest([shared_data / "swe_agent"], options)
    assert (report.rollouts, report.stepwise_rows) == (3, 27)
    assert report.lost_sharing.step_pairs == 0
