"""AReaL: write the rows of a training step for ``harts ingest``.

Call ``dump_rows(batch, step, "rollouts")`` on the rollout batch *before* ``actor.compute_advantages``, which
shifts ``loss_mask`` and ``logprobs`` by one. AReaL keeps no group id, so ingest with
``--group-size <samples per prompt> --advantages grpo``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TENSORS = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards")


def dump_rows(batch: dict[str, Any], step: int, folder: str) -> None:
    """Write ``folder/step_<step>.jsonl``, one line per trajectory of a batch of padded tensors."""
    columns = {name: batch[name].tolist() for name in TENSORS if name in batch}
    with open(Path(folder) / f"step_{step}.jsonl", "w") as file:
        for i in range(len(columns["input_ids"])):
            row = {name: values[i] for name, values in columns.items()}
            file.write(json.dumps(row | {"id": f"{step}/{i}"}) + "\n")
