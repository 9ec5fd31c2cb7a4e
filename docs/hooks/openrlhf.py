"""OpenRLHF: write the rows of a training step for ``harts ingest``.

Call ``dump_rows(experiences, step, "rollouts")`` where the experience maker has computed advantages. Tensors
over actions are shorter than ``sequences`` and belong to its last tokens, which is how ingest reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TENSORS = (
    "sequences",
    "attention_mask",
    "action_mask",
    "action_log_probs",
    "base_action_log_probs",
    "advantages",
)
RENAMED = {"action_log_probs": "old_logprobs"}


def dump_rows(experiences: list[Any], step: int, folder: str) -> None:
    """Write ``folder/step_<step>.jsonl``, one line per sequence of every ``Experience``."""
    number = 0
    with open(Path(folder) / f"step_{step}.jsonl", "w") as file:
        for experience in experiences:
            values = {RENAMED.get(n, n): getattr(experience, n, None) for n in TENSORS}
            columns = {n: v.tolist() for n, v in values.items() if v is not None}
            for i in range(len(columns["sequences"])):
                row = {name: rows[i] for name, rows in columns.items()}
                row |= {"id": f"{step}/{number}", "reward": float(experience.info["reward"][i])}
                file.write(json.dumps(row) + "\n")
                number += 1
