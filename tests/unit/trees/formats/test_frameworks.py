"""verifiers, NeMo-RL, Atropos and prime-rl records, and what is wrong with them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from harts_core.errors import DataError
from harts_core.trees.formats import FORMATS, sniff_format
from tests.unit.trees.ingest_helpers import ingest_rows


def node(ids: list[int], trained: bool, parent: int | None = None, **more: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"token_ids": ids, "mask": [trained] * len(ids), "logprobs": [], **more}
    if trained and "logprobs" not in more:
        out["logprobs"] = [-float(i) for i in ids]
    if parent is not None:
        out["parent"] = parent
    return out


def episode() -> dict[str, Any]:
    """A fork after node 1: two paths."""
    return {
        "id": "e",
        "group": {"id": "g0"},
        "run": {"work": {"policy": {"start": 6, "end": 7}}},
        "traces": [
            {
                "id": "t",
                "nodes": [
                    node([1, 2], False),
                    node([3, 4], True, 0, advantages=[0.5, 0.25]),
                    node([5], True, 1, advantages=[1.0]),
                    node([6, 7], True, 1, advantages=[2.0, 3.0]),
                ],
                "rewards": {"a": {"score": 2.0, "weight": 0.5}, "b": {"score": 1.0, "weight": 3.0}},
            }
        ],
    }


def test_verifiers_paths(tmp_path: Path) -> None:
    tree, report = ingest_rows(tmp_path, [episode()])
    assert tree.trajectory_id == ("t/0", "t/1")
    assert tree.group_id == ("g0", "g0")
    assert [tree.tokens(i).tolist() for i in (0, 1)] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7]]
    assert [tree.loss_spans[i].tolist() for i in (0, 1)] == [[2, 5], [2, 6]]
    assert tree.old_logprobs is not None
    assert tree.advantages is not None
    assert tree.policy_version is not None
    assert tree.reward is not None
    assert tree.old_logprobs[1].tolist() == [-3, -4, -6, -7]
    assert tree.advantages[1].tolist() == [0.5, 0.25, 2, 3]
    assert tree.reward.tolist() == [4.0, 4.0]
    assert tree.policy_version.tolist() == [7, 7]
    assert (report.rollouts, report.forks) == (1, 1)


def test_traces_of_agents_that_are_not_trained_are_counted(tmp_path: Path) -> None:
    record = episode()
    other = copy.deepcopy(record["traces"][0]) | {"id": "judge", "agent": {"trainable": False}}
    record["traces"].append(other)
    tree, report = ingest_rows(tmp_path, [record])
    assert tree.num_rows == 2
    assert report.dropped["no trained position"].count == 2


@pytest.mark.parametrize(
    ("change", "message", "place"),
    [
        ({"parent": 5}, "parent 5 is not an earlier node", "trace 0, node 2"),
        ({"parent": 2}, "parent 2 is not an earlier node", "trace 0, node 2"),
        ({"mask": [True, True]}, "mask has 2 values for 1 token_ids", "trace 0, node 2"),
        ({"logprobs": [-1.0, -2.0]}, "logprobs has 2 values for 1 true mask values", "trace 0, node 2"),
        ({"logprobs": None}, "logprobs is missing on a node that is trained", "trace 0, node 2"),
        ({"token_ids": "x"}, "token_ids is str, not a list", "trace 0, node 2"),
        ({"logprobs": [0.5]}, "old_logprobs is 0.5, above 0", "trace 0, path 0"),
    ],
)
def test_verifiers_errors(tmp_path: Path, change: dict[str, Any], message: str, place: str) -> None:
    record = episode()
    record["traces"][0]["nodes"][2] |= change
    with pytest.raises(DataError, match=message) as error:
        ingest_rows(tmp_path, [record])
    assert error.value.where == f"rows.jsonl, line 1, {place}"


def nemo() -> dict[str, Any]:
    return {
        "token_ids": [[1, 2, 3, 0]],
        "input_lengths": [3],
        "token_loss_mask": [[0, 1, 1, 1]],
        "sample_loss_mask": [1.0],
        "generation_logprobs": [[0, -9, -9, 0]],
        "prev_logprobs": [[0, -1, -2, 0]],
        "advantages": [[0.5, 0.5, 0.5, 0.5]],
        "rewards": [2.0],
        "idx": 0,
    }


def test_nemo_rl(tmp_path: Path) -> None:
    excluded = nemo() | {"sample_loss_mask": [0.0]}
    older = nemo() | {"prev_logprobs": None, "input_lengths": [2]}
    tree, report = ingest_rows(tmp_path, [nemo(), excluded, older])
    assert tree.trajectory_id == ("rows.jsonl:3", "rows.jsonl:1")
    assert tree.tokens(1).tolist() == [1, 2, 3]
    assert tree.old_logprobs is not None
    assert tree.advantages is not None
    assert tree.old_logprobs[1].tolist() == [-1, -2]  # prev_logprobs win
    assert tree.old_logprobs[0].tolist() == [-9]
    assert tree.advantages[1].tolist() == [0.5, 0.5]
    assert report.dropped["no trained position"].count == 1
    assert any("every group has one rollout" in w for w in report.warnings)


def test_nemo_rl_batches_have_one_trajectory_per_entry(tmp_path: Path) -> None:
    batch = {k: v * 2 if isinstance(v, list) else v for k, v in nemo().items()}
    tree, _ = ingest_rows(tmp_path, [batch], group_size=2)
    assert tree.trajectory_id == ("rows.jsonl:1/0", "rows.jsonl:1/1")
    assert set(tree.group_id) == {"rows.jsonl:0"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_lengths": [5]}, "input_lengths is 5 for 4 token_ids"),
        ({"prev_logprobs": [[0, -1]]}, "prev_logprobs has 2 values for 4 token_ids"),
        ({"rewards": [1.0, 2.0]}, "rewards is not a list of 1 entries"),
        ({"sample_loss_mask": [0.5]}, "sample_loss_mask is 0.5; it must be 0 or 1"),
    ],
)
def test_nemo_rl_errors(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ingest_rows(tmp_path, [nemo() | change])


def atropos() -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3], [1, 2, 4]],
        "masks": [[-100, -100, 3], [-100, 2, 4]],
        "inference_logprobs": [[1.0, 1.0, -0.5], [1.0, -1.0, -2.0]],
        "ref_logprobs": None,
        "advantages": [0.5, [0.0, 0.25, 0.75]],
        "scores": [1.0, -1.0],
    }


def test_atropos(tmp_path: Path) -> None:
    tree, report = ingest_rows(tmp_path, [atropos()])
    assert tree.trajectory_id == ("rows.jsonl:1/0", "rows.jsonl:1/1")
    assert set(tree.group_id) == {"rows.jsonl:1"}
    assert [tree.loss_spans[i].tolist() for i in (0, 1)] == [[2, 3], [1, 3]]
    assert tree.old_logprobs is not None
    assert tree.advantages is not None
    assert tree.reward is not None
    assert tree.old_logprobs[1].tolist() == [-1, -2]
    assert [tree.advantages[i].tolist() for i in (0, 1)] == [[0.5], [0.25, 0.75]]
    assert tree.reward.tolist() == [1, -1]
    assert not report.warnings  # 1.0 on the prompt is filler


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1.0]}, "scores has 1 entries for 2 sequences"),
        ({"masks": [[-100, 2], [-100, 2, 4]]}, "masks has 2 values for 3 tokens"),
        ({"inference_logprobs": [[1.0] * 3, [1.0] * 3]}, "old_logprobs is 1 .*above 0"),
    ],
)
def test_atropos_errors(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        ingest_rows(tmp_path, [atropos() | change])
    assert error.value.where is not None


def test_prime_rl(tmp_path: Path) -> None:
    record = {
        "token_ids": [1, 2, 3],
        "loss_mask": [False, True, True],
        "inference_logprobs": [0.0, -1.0, -2.0],
        "advantages": [0.5, 0.5, 0.25],
    }
    tree, _ = ingest_rows(tmp_path, [record])
    assert tree.old_logprobs is not None
    assert tree.advantages is not None
    assert tree.old_logprobs[0].tolist() == [-1, -2]
    assert tree.advantages[0].tolist() == [0.5, 0.25]


def test_each_format_is_sniffed_as_itself() -> None:
    samples = {"verifiers": episode(), "nemo-rl": nemo(), "atropos": atropos()}
    for name, record in samples.items():
        assert sniff_format(record).name == name
    assert len({f.name for f in FORMATS}) == len(FORMATS)
