"""verl: write the rows of a training step for ``harts ingest``.

Call ``dump_rows(batch, self.global_steps, "rollouts")`` in ``RayPPOTrainer.fit`` after ``compute_advantage``.
The padded DataProto layout is read as it is. (``trainer.rollout_data_dir`` writes decoded text, from which
the token ids cannot be recovered.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TENSORS = (
    "prompts",
    "responses",
    "attention_mask",
    "response_mask",
    "old_log_probs",
    "ref_log_prob",
    "advantages",
)


def dump_rows(batch: Any, step: int, folder: str) -> None:
    """Write ``folder/step_<step>.jsonl``, one line per trajectory of a ``DataProto``."""
    columns = {name: batch.batch[name].tolist() for name in TENSORS if name in batch.batch}
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    with open(Path(folder) / f"step_{step}.jsonl", "w") as file:
        for i, uid in enumerate(batch.non_tensor_batch["uid"]):
            row = {name: values[i] for name, values in columns.items()}
            row |= {"id": f"{step}/{i}", "uid": str(uid), "score": scores[i], "policy_version": step}
            file.write(json.dumps(row) + "\n")
