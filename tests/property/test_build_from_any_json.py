"""Whatever JSON a file holds, ingest ends in a checked tree or in one HartsError; never in anything else."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harts_core.errors import HartsError
from harts_core.trees.ingest import ingest
from harts_core.trees.ingest_options import IngestOptions
from harts_core.trees.tree_check import check_tree

numbers = st.one_of(
    st.integers(-3, 12), st.sampled_from([2**31, 2**63, 2**70, -(2**70), 10**400]), st.floats(width=32)
)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.sampled_from(["", "3", "x", "nan", "\ud800", "1e5"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=8,
)

RECORDS: dict[str, dict[str, Any]] = {
    "rows": {
        "tokens": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "old_logprobs": [0, -1, -1],
        "advantages": 0.5,
        "reward": 1.0,
        "step": 1,
        "versions": [1, 2, 3],
        "attention_mask": [1, 1, 1],
        "response_length": 2,
        "trajectory_id": "t",
        "group_id": "g",
        "vocab_size": 10,
    },
    "spans": {"prompt_ids": [1, 2], "response_ids": [3, 4], "loss_spans": [[1, 3]], "ref_logprobs": [-1, -1]},
    "verifiers": {
        "id": "e",
        "group": {"id": "g"},
        "run": {"work": {"policy": {"end": 3}}},
        "traces": [
            {
                "id": "t",
                "nodes": [
                    {"token_ids": [1, 2], "mask": [False, True], "logprobs": [-1]},
                    {"token_ids": [3], "mask": [True], "logprobs": [-1], "parent": 0, "advantages": [1]},
                ],
                "rewards": {"a": {"score": 1.0, "weight": 1.0}},
            }
        ],
    },
    "nemo-rl": {
        "token_ids": [[1, 2, 3]],
        "input_lengths": [3],
        "token_loss_mask": [[0, 1, 1]],
        "sample_loss_mask": [1.0],
        "prev_logprobs": [[0, -1, -1]],
        "rewards": [1.0],
    },
    "atropos": {
        "tokens": [[1, 2, 3]],
        "masks": [[-100, 2, 3]],
        "inference_logprobs": [[1.0, -1, -1]],
        "advantages": [1.0],
        "scores": [1.0],
    },
    "slime": {
        "rollout_id": 1,
        "samples": [
            {
                "tokens": [1, 2],
                "response_length": 1,
                "loss_mask": [1],
                "reward": {"a": 1.0},
                "index": 0,
                "weight_versions": ["3"],
            }
        ],
    },
    "harbor": {
        "trial_name": "t",
        "task_name": "k",
        "rollout_details": [{"prompt_token_ids": [[1]], "completion_token_ids": [[2]], "logprobs": [[-1.0]]}],
        "verifier_result": {"rewards": {"reward": 1.0}},
    },
    "atif": {
        "schema_version": "ATIF-v1.4",
        "session_id": "s",
        "steps": [
            {
                "step_id": 1,
                "source": "agent",
                "metrics": {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-1]},
            }
        ],
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a record."""
    if isinstance(value, dict):
        inner = [p for k, v in value.items() for p in places(v, (*path, k))]
    elif isinstance(value, list):
        inner = [p for k, v in enumerate(value) for p in places(v, (*path, k))]
    else:
        inner = []
    return ([path] if path else []) + inner


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_anywhere(data: st.DataObject) -> None:
    record = copy.deepcopy(RECORDS[data.draw(st.sampled_from(sorted(RECORDS)))])
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(places(record)))
        target: Any = record
        for key in path[:-1]:
            target = target[key]
        if data.draw(st.integers(0, 9)) == 0:
            del target[path[-1]]
        else:
            target[path[-1]] = data.draw(values)
    options = IngestOptions(
        on_bad_record=data.draw(st.sampled_from(["error", "skip"])),
        on_nonfinite=data.draw(st.sampled_from(["error", "drop"])),
        duplicate_ids="suffix",
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.jsonl"
        file.write_text(json.dumps(record) + "\n" + json.dumps(RECORDS["rows"] | {"id": "u"}) + "\n")
        try:
            tree, _ = ingest([file], options)
        except HartsError:
            return
    check_tree(tree, "made")
