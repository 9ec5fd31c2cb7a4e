"""The hooks of docs/hooks on batches shaped like each framework's: their rows ingest to what was sampled."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harts_core.trees.ingest import ingest
from harts_core.trees.ingest_options import IngestOptions
from harts_core.trees.rollout_tree import RolloutTree

HOOKS = Path(__file__).resolve().parents[2] / "docs" / "hooks"
# Two trajectories of one prompt: [5, 6] then [7, 8, 9] and [7, 4]; padding is 0.
PROMPTS = np.array([[0, 5, 6], [0, 5, 6]])
RESPONSES = np.array([[7, 8, 9], [7, 4, 0]])
RESPONSE_MASK = np.array([[1, 1, 1], [1, 1, 0]])
ATTENTION = np.array([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]])
LOGPROBS = np.array([[-0.5, -0.25, -0.125], [-1.0, -2.0, 0.0]])
ADVANTAGES = np.array([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])
REWARDS = np.array([1.0, 0.0])


def hook(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"hook_{name}", HOOKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dump_rows


def check(folder: Path, *, groups: int = 1, **options: Any) -> RolloutTree:
    """Ingest ``step_3.jsonl``; the two trajectories, sorted, with their log-probs and advantages."""
    tree, report = ingest([folder / "step_3.jsonl"], IngestOptions(**options))
    assert [tree.tokens(i).tolist() for i in range(2)] == [[5, 6, 7, 4], [5, 6, 7, 8, 9]]
    assert [tree.loss_spans[i].tolist() for i in range(2)] == [[2, 4], [2, 5]]
    assert tree.old_logprobs is not None
    assert tree.advantages is not None
    assert [tree.old_logprobs[i].tolist() for i in range(2)] == [[-1, -2], [-0.5, -0.25, -0.125]]
    np.testing.assert_allclose([tree.advantages[i][0] for i in range(2)], [-1, 1], atol=1e-5)
    assert len(set(tree.group_id)) == groups
    assert not report.dropped
    return tree


def test_verl(tmp_path: Path) -> None:
    tensors = {
        "prompts": PROMPTS,
        "responses": RESPONSES,
        "attention_mask": ATTENTION,
        "response_mask": RESPONSE_MASK,
        "old_log_probs": LOGPROBS,
        "ref_log_prob": LOGPROBS - 1,
        "advantages": ADVANTAGES,
        "token_level_scores": np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
    }
    hook("verl")(
        SimpleNamespace(batch=tensors, non_tensor_batch={"uid": np.array(["u", "u"])}), 3, str(tmp_path)
    )
    tree = check(tmp_path)
    assert tree.trajectory_id == ("3/1", "3/0")
    assert tree.ref_logprobs is not None
    assert tree.reward is not None
    assert tree.reward.tolist() == [0, 1]


def test_areal(tmp_path: Path) -> None:
    zeros = np.zeros((2, 3))
    batch = {
        "input_ids": np.hstack([PROMPTS, RESPONSES]),
        "attention_mask": ATTENTION,
        "loss_mask": np.hstack([zeros, RESPONSE_MASK]),
        "logprobs": np.hstack([zeros, LOGPROBS]),
        "versions": np.hstack([zeros.astype(int) - 1, RESPONSE_MASK * 4]),
        "rewards": REWARDS,
    }
    hook("areal")(batch, 3, str(tmp_path))
    tree = check(tmp_path, group_size=2, advantages="grpo")
    assert tree.policy_version is not None
    assert tree.policy_version.tolist() == [4, 4]


def test_skyrl(tmp_path: Path) -> None:
    output = {
        "prompt_token_ids": [[5, 6], [5, 6]],
        "response_ids": [[7, 8, 9], [7, 4]],
        "loss_masks": [[1, 1, 1], [1, 1]],
        "rollout_logprobs": [[-0.5, -0.25, -0.125], [-1.0, -2.0]],
        "rewards": [1.0, 0.0],
        "trajectory_ids": [SimpleNamespace(instance_id="task", repetition_id=i) for i in range(2)],
    }
    hook("skyrl")(output, 3, str(tmp_path))
    tree = check(tmp_path, advantages="grpo")
    assert tree.trajectory_id == ("3/task/1#0", "3/task/0#0")


def test_trl(tmp_path: Path) -> None:
    outputs = {
        "prompt_ids": PROMPTS,
        "prompt_mask": ATTENTION[:, :3],
        "completion_ids": RESPONSES,
        "completion_mask": RESPONSE_MASK,
        "old_per_token_logps": LOGPROBS,
        "ref_per_token_logps": None,
        "advantages": np.array([1.0, -1.0]),
    }
    hook("trl")(outputs, 3, str(tmp_path))
    check(tmp_path, group_by_prompt=True)


@pytest.mark.parametrize("per_action", [True, False])
def test_openrlhf(tmp_path: Path, per_action: bool) -> None:
    """Per-action tensors cover tokens 1 … T − 1, or the response alone."""
    pad = np.zeros((2, 2 if per_action else 0))
    experience = SimpleNamespace(
        sequences=np.hstack([PROMPTS, RESPONSES]),
        attention_mask=ATTENTION,
        action_mask=np.hstack([pad, RESPONSE_MASK]),
        action_log_probs=np.hstack([pad, LOGPROBS]),
        advantages=np.hstack([pad, ADVANTAGES]),
        info={"reward": REWARDS},
    )
    hook("openrlhf")([experience], 3, str(tmp_path))
    check(tmp_path, group_by_prompt=True)
