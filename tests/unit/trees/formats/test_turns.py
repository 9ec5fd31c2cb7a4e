"""Harbor trials, ATIF steps and slime rollout dumps."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from harts_core.errors import DataError, MissingBackendError
from harts_core.trees.ingest import ingest
from harts_core.trees.ingest_options import IngestOptions
from tests.unit.trees.ingest_helpers import ingest_rows


def trial() -> dict[str, Any]:
    return {
        "trial_name": "t1",
        "task_name": "fix-bug",
        "agent_result": {
            "rollout_details": [
                {
                    "prompt_token_ids": [[1, 2], [1, 2, 3, 4, 9]],
                    "completion_token_ids": [[3, 4], [5]],
                    "logprobs": [[-0.5, -0.25], [-0.125]],
                }
            ]
        },
        "verifier_result": {"rewards": {"reward": 1.0}},
    }


def test_harbor_turns_continue_each_other(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(trial(), indent=4))
    tree, report = ingest([tmp_path / "result.json"])
    assert tree.trajectory_id == ("t1#0", "t1#1")
    assert tree.group_id == ("fix-bug", "fix-bug")
    assert tree.lcp.tolist() == [0, 4]
    assert [tree.loss_spans[i].tolist() for i in (0, 1)] == [[2, 4], [5, 6]]
    assert tree.old_logprobs is not None
    assert tree.reward is not None
    assert [tree.old_logprobs[i].tolist() for i in (0, 1)] == [[-0.5, -0.25], [-0.125]]
    assert tree.reward.tolist() == [1, 1]
    assert (report.rollouts, report.lost_sharing.step_pairs) == (1, 0)


def test_harbor_rewards_by_key(tmp_path: Path) -> None:
    record = trial() | {"verifier_result": {"rewards": {"tests": 0.5, "style": 0.25}}}
    with pytest.raises(DataError, match="rewards has the entries tests, style"):
        ingest_rows(tmp_path, [record])
    tree, _ = ingest_rows(tmp_path, [record], reward_key="style")
    assert tree.reward is not None
    assert tree.reward.tolist() == [0.25, 0.25]


def test_harbor_lengths(tmp_path: Path) -> None:
    record = trial()
    record["agent_result"]["rollout_details"][0]["logprobs"][1] = [-1.0, -2.0]
    with pytest.raises(
        DataError, match="old_logprobs has 2 values for 6 tokens or 1 response tokens"
    ) as error:
        ingest_rows(tmp_path, [record])
    assert error.value.where == "rows.jsonl, line 1, chat 0, turn 1"
    record["agent_result"]["rollout_details"][0]["logprobs"].pop()
    with pytest.raises(DataError, match="2 prompts, 2 completions and 1 logprobs"):
        ingest_rows(tmp_path, [record])


def test_harbor_chats_are_branches(tmp_path: Path) -> None:
    record = trial()
    record["agent_result"]["rollout_details"] *= 2
    tree, _ = ingest_rows(tmp_path, [record])
    assert set(tree.trajectory_id) == {"t1/0#0", "t1/0#1", "t1/1#0", "t1/1#1"}


def atif() -> dict[str, Any]:
    def agent(i: int, prompt: list[int], completion: list[int]) -> dict[str, Any]:
        metrics = {"prompt_token_ids": prompt, "completion_token_ids": completion}
        return {"step_id": i, "source": "agent", "metrics": metrics | {"logprobs": [-1.0] * len(completion)}}

    steps = [{"step_id": 1, "source": "user"}, agent(2, [1, 2], [3]), agent(3, [1, 2, 3], [4, 5])]
    return {"schema_version": "ATIF-v1.4", "session_id": "s", "steps": steps}


def test_atif_steps(tmp_path: Path) -> None:
    tree, _ = ingest_rows(tmp_path, [atif()])
    assert tree.trajectory_id == ("s#2", "s#3")
    assert [tree.loss_spans[i].tolist() for i in (0, 1)] == [[2, 3], [3, 5]]


def test_atif_copied_context_is_not_trained(tmp_path: Path) -> None:
    record = atif()
    record["steps"][1]["is_copied_context"] = True
    tree, report = ingest_rows(tmp_path, [record])
    assert tree.trajectory_id == ("s#3",)
    assert report.dropped["no trained position"].count == 1


def test_atif_more_logprobs_than_completion_ids(tmp_path: Path) -> None:
    record = atif()
    record["steps"][1]["metrics"] |= {"completion_token_ids": list(range(37)), "logprobs": [-1.0] * 44}
    with pytest.raises(DataError, match="old_logprobs has 44 values for 39 tokens or 37 response tokens"):
        ingest_rows(tmp_path, [record])
    del record["steps"][1]["metrics"]["completion_token_ids"]
    with pytest.raises(DataError, match="metrics has no prompt_token_ids and completion_token_ids"):
        ingest_rows(tmp_path, [record])


def slime() -> dict[str, Any]:
    good = {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": None, "rollout_log_probs": [-1.0, -2.0]}
    good |= {"reward": 1.0, "group_index": 0, "weight_versions": ["default", "3", "4"]}
    return {
        "rollout_id": 5,
        "samples": [
            good | {"index": 0},
            good | {"index": 1, "loss_mask": [0, 1], "weight_versions": ["default"]},
            good | {"index": 2, "remove_sample": True},
        ],
    }


def test_slime_torch_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dump = slime()
    dump["samples"][0]["tokens"] = torch.tensor([1, 2, 3])
    torch.save(dump, tmp_path / "rollout_5.pt")
    tree, report = ingest([tmp_path / "rollout_5.pt"])
    assert tree.trajectory_id == ("5/0", "5/1")
    assert set(tree.group_id) == {"5/0"}
    assert [tree.loss_spans[i].tolist() for i in (0, 1)] == [[1, 3], [2, 3]]
    assert tree.old_logprobs is not None
    assert tree.policy_version is not None
    assert tree.policy_version_valid is not None
    assert tree.old_logprobs[1].tolist() == [-2]
    assert tree.policy_version[0] == 4
    assert tree.policy_version_valid.tolist() == [True, False]
    assert report.dropped["no trained position"].count == 1


class NotPlainData:
    """torch.load(weights_only=True) must refuse it."""


def test_torch_files_that_hold_code_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"rollout_id": 0, "samples": [NotPlainData()]}, tmp_path / "x.pt")
    with pytest.raises(DataError, match="cannot be loaded as plain data"):
        ingest([tmp_path / "x.pt"], IngestOptions())
    (tmp_path / "y.pt").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(DataError, match="cannot be loaded as plain data"):
        ingest([tmp_path / "y.pt"])


def test_without_torch_the_install_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04")

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingBackendError, match="needs torch") as error:
        ingest([tmp_path / "x.pt"])
    assert error.value.hint == 'pip install "harts[train]"'
