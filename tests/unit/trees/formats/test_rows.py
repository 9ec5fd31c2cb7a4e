"""HARTS rows: the aliases, the layouts decided by length, padding, mapping, containers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from harts_core.errors import ConfigError, DataError
from harts_core.trees.formats.rows import ALIASES
from harts_core.trees.ingest import ingest
from harts_core.trees.ingest_options import IngestOptions
from harts_core.trees.rollout_tree import RolloutTree
from tests.unit.trees.ingest_helpers import ingest_rows, row, write_jsonl

PROMPT, RESPONSE = [5, 6], [7, 8, 9]
LOGPROBS = [-0.5, -0.25, -0.125]
PARTS: dict[str, Any] = {"prompt_ids": PROMPT, "response_ids": RESPONSE}


def check(tree: RolloutTree, spans: list[int], old: list[float] | None, index: int = 0) -> None:
    assert tree.tokens(index).tolist() == PROMPT + RESPONSE
    assert tree.loss_spans[index].tolist() == spans
    if old is None:
        assert tree.old_logprobs is None
    else:
        assert tree.old_logprobs is not None
        assert tree.old_logprobs[index].tolist() == old


@pytest.mark.parametrize(
    ("record", "spans", "old"),
    [
        pytest.param({**PARTS}, [2, 5], None, id="no mask: the response"),
        pytest.param({**PARTS, "logprobs": LOGPROBS}, [2, 5], LOGPROBS, id="response length"),
        pytest.param({**PARTS, "logprobs": [0, 0, *LOGPROBS]}, [2, 5], LOGPROBS, id="full length"),
        pytest.param(
            {**PARTS, "loss_mask": [1, 0, 1], "logprobs": [-0.5, -0.125]},
            [2, 3, 4, 5],
            [-0.5, -0.125],
            id="mask-count length",
        ),
        pytest.param(
            {**PARTS, "loss_mask": [1, 0, 1], "logprobs": LOGPROBS},
            [2, 3, 4, 5],
            [-0.5, -0.125],
            id="response-length values under a response-length mask",
        ),
        pytest.param(
            {**PARTS, "loss_mask": [0, 1, 0, 0, 1], "logprobs": [-1, -2]},
            [1, 2, 4, 5],
            [-1, -2],
            id="full-length mask, mask-count values",
        ),
        pytest.param(
            {"input_ids": PROMPT + RESPONSE, "response_mask": [1, 1, 1], "logprobs": LOGPROBS},
            [2, 5],
            LOGPROBS,
            id="a response mask beside full tokens",
        ),
        pytest.param(
            {"tokens": PROMPT + RESPONSE, "response_length": 3, "loss_mask": [0, 1, 1], "logprobs": LOGPROBS},
            [3, 5],
            LOGPROBS[1:],
            id="a stated response length",
        ),
        pytest.param(
            {
                "input_ids": [[0, *PROMPT, *RESPONSE, 0]],
                "attention_mask": [[0, 1, 1, 1, 1, 1, 0]],
                "responses": [[*RESPONSE, 0]],
                "response_mask": [[1, 0, 1, 0]],
                "old_log_probs": [[*LOGPROBS, 0.0]],
            },
            [2, 3, 4, 5],
            [-0.5, -0.125],
            id="verl DataProto: [1, T], padded left and right",
        ),
        pytest.param(
            {
                "prompts": [0, *PROMPT],
                "responses": [*RESPONSE, 0],
                "attention_mask": [0, 1, 1, 1, 1, 1, 0],
                "old_log_probs": [*LOGPROBS, 0.0],
            },
            [2, 5],
            LOGPROBS,
            id="padded parts, no mask: the attended response",
        ),
        pytest.param(
            {"tokens": PROMPT + RESPONSE, "loss_spans": [[1, 2], [3, 5]], "logprobs": LOGPROBS},
            [1, 2, 3, 5],
            LOGPROBS,
            id="spans",
        ),
        pytest.param(
            {"tokens": PROMPT + RESPONSE, "loss_spans": [{"start": 2, "stop": 5}], "loss_mask": None},
            [2, 5],
            None,
            id="spans as objects",
        ),
        pytest.param(
            {"tokens": PROMPT + RESPONSE, "loss_mask": [False, False, True, True, True]},
            [2, 5],
            None,
            id="booleans",
        ),
        pytest.param(
            {"tokens": PROMPT + RESPONSE, "loss_mask": [0.0, 0.0, 1.0, 1.0, 1.0]}, [2, 5], None, id="floats"
        ),
    ],
)
def test_layouts(tmp_path: Path, record: dict[str, Any], spans: list[int], old: list[float] | None) -> None:
    tree, report = ingest_rows(tmp_path, [record])
    check(tree, spans, old)
    assert not report.warnings


def test_every_alias_is_read(tmp_path: Path) -> None:
    """Each alias alone gives the same row as HARTS's own name."""
    values: dict[str, Any] = {
        "tokens": [5, 6, 7, 8],
        "loss_mask": [0, 0, 1, 1],
        "old_logprobs": [0, 0, -1, -2],
        "ref_logprobs": [0, 0, -3, -4],
        "advantages": [0, 0, 0.5, 0.25],
        "reward": 1.5,
        "group_id": "g",
        "trajectory_id": "t",
        "step": 4,
        "policy_version": 7,
    }
    expected, _ = ingest_rows(tmp_path, [values])
    for field, value in values.items():
        for alias in ALIASES[field]:
            record = {k: v for k, v in values.items() if k != field} | {alias: value}
            tree, _ = ingest_rows(tmp_path, [record])
            assert tree.content_sha256 == expected.content_sha256, alias
    for prompt in ALIASES["prompt"]:
        for response in ALIASES["response"]:
            record = {k: v for k, v in values.items() if k != "tokens"} | {prompt: [5, 6], response: [7, 8]}
            tree, _ = ingest_rows(tmp_path, [record])
            assert tree.content_sha256 == expected.content_sha256, (prompt, response)


def test_mapping_overrides_aliases(tmp_path: Path) -> None:
    record = row(tokens=[1, 1, 1, 1], my={"ids": [5, 6, 7, 8]}, uid="other")
    tree, _ = ingest_rows(tmp_path, [record], fields={"tokens": "my.ids", "group_id": "uid"})
    assert tree.tokens(0).tolist() == [5, 6, 7, 8]
    assert tree.group_id == ("other",)
    with pytest.raises(DataError, match=r"nothing \(mapped to reward\) is missing or null"):
        ingest_rows(tmp_path, [record], fields={"reward": "nothing"})
    with pytest.raises(ConfigError, match="--map is for HARTS rows; this is atropos"):
        ingest_rows(tmp_path, [{"tokens": [], "masks": [], "scores": []}], fields={"reward": "x"})
    with pytest.raises(ConfigError, match="--map is for HARTS rows; this is nemo-rl"):
        ingest_rows(tmp_path, [record], fields={"reward": "x"}, format="nemo-rl")


def test_ids_of_steps_and_of_rows_without_ids(tmp_path: Path) -> None:
    records = [
        row(trajectory_id="r", step=0),
        row(trajectory_id="r#1", step=1),
        row(trajectory_id=..., instance_id="g", repetition_id=3, step=0),
        row(trajectory_id=...),
        row(trajectory_id=12, group_id=...),
    ]
    tree, report = ingest_rows(tmp_path, records)
    assert set(tree.trajectory_id) == {"r#0", "r#1", "g/3#0", "rows.jsonl:4", "12"}
    assert dict(zip(tree.trajectory_id, tree.group_id, strict=True))["12"] == "12"
    assert (report.rollouts, report.stepwise_rows) == (4, 3)


def test_versions_and_token_level_rewards(tmp_path: Path) -> None:
    records = [
        row(trajectory_id="a", versions=[-1, -1, 3, 4], rewards=[0, 0, 0.5, 0.25]),
        row(trajectory_id="b", weight_version="9", rewards=[2.0]),
        row(trajectory_id="c", versions=[-1, -1, -1, -1]),
    ]
    tree, report = ingest_rows(tmp_path, records)
    assert tree.policy_version is not None
    assert tree.policy_version_valid is not None
    assert tree.policy_version[:2].tolist() == [4, 9]
    assert tree.policy_version_valid.tolist() == [True, True, False]
    assert tree.reward is not None
    assert tree.reward[:2].tolist() == [0.75, 2.0]
    assert "reward: token-level rewards summed" in report.warnings


def test_every_container_gives_the_same_tree(tmp_path: Path) -> None:
    records = [row(trajectory_id=f"t{i}", tokens=[5, 6, 7, i], reward=float(i)) for i in range(200)]
    text = write_jsonl(tmp_path / "rows.jsonl", records).read_bytes()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text))
    halves = zstandard.compress(text[:5000]) + zstandard.compress(text[5000:])  # two frames
    (tmp_path / "rows.jsonl.zst").write_bytes(halves)
    (tmp_path / "rows.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "line.json").write_text(json.dumps(records))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n\n", 3))
    table = pa.Table.from_pylist(records)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=70)
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=33)
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    files = [f for f in sorted(tmp_path.iterdir()) if f.is_file()]
    hashes = {f.name: ingest([f])[0].content_sha256 for f in files}
    assert len(hashes) == 9
    assert len(set(hashes.values())) == 1, hashes


def test_columnar_types(tmp_path: Path) -> None:
    """Small integer types, nested [1, T] lists, nulls and dictionaries read as their values."""
    table = pa.table(
        {
            "input_ids": pa.array([[[5, 6, 7]], [[5, 6]]], pa.list_(pa.list_(pa.int64()))),
            "loss_mask": pa.array([[0, 1, 1], [0, 1]], pa.list_(pa.uint8())),
            "logprobs": pa.array([[None, -0.5, -0.25], None], pa.list_(pa.float64())),
            "group_id": pa.array(["g", "g"]).dictionary_encode(),
            "reward": pa.array([1.0, None], pa.float16()),
            "text": pa.array(["x", "y"]),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    tree, _ = ingest([tmp_path / "x.parquet"])
    assert tree.trajectory_id == ("x.parquet:1", "x.parquet:0")
    assert tree.old_logprobs is not None
    assert tree.old_logprobs.is_null(0)
    assert tree.old_logprobs[1].tolist() == [-0.5, -0.25]
    assert tree.reward is not None
    assert np.isnan(tree.reward[0])


def test_directories_globs_and_shards(tmp_path: Path) -> None:
    for i in (10, 2):
        write_jsonl(tmp_path / f"step_{i}.jsonl", [row(trajectory_id=..., group_id=..., tokens=[1, 2, 3, i])])
    (tmp_path / "README.md").write_text("x")
    (tmp_path / ".hidden.jsonl").write_text("x")
    tree, report = ingest([tmp_path])
    name = tmp_path.name
    assert tree.trajectory_id == (f"{name}/step_2.jsonl:1", f"{name}/step_10.jsonl:1")
    assert report.warnings["files left aside (no known suffix)"].first == f"{name}/README.md"
    assert [s["name"] for s in report.sources] == [f"{name}/step_10.jsonl", f"{name}/step_2.jsonl"]
    tree, _ = ingest([str(tmp_path / "step_*.jsonl")])
    assert tree.trajectory_id == ("step_2.jsonl:1", "step_10.jsonl:1")


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "r.jsonl", [row(trajectory_id=..., group_id=...)])
    tree, _ = ingest([tmp_path / "x" / "r.jsonl", tmp_path / "y" / "r.jsonl"], IngestOptions())
    assert tree.trajectory_id == ("x/r.jsonl:1", "y/r.jsonl:1")
