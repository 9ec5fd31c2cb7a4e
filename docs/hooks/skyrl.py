"""SkyRL: write the rows of a training step for ``harts ingest``.

Call ``dump_rows(output, step, "rollouts")`` on what ``generator.generate`` returns. Step-wise output
(several rows of one ``TrajectoryID``) becomes step-wise rows. Advantages: ``--advantages grpo``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def dump_rows(output: dict[str, Any], step: int, folder: str) -> None:
    """Write ``folder/step_<step>.jsonl``, one line per response of a ``GeneratorOutput``."""
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards")
    seen: Counter[tuple[str, int]] = Counter()
    with open(Path(folder) / f"step_{step}.jsonl", "w") as file:
        for i, trajectory in enumerate(output["trajectory_ids"]):
            row = {name: output[name][i] for name in names if output.get(name) is not None}
            key = (str(trajectory.instance_id), int(trajectory.repetition_id))
            row |= {"instance_id": f"{step}/{key[0]}", "repetition_id": key[1], "turn": seen[key]}
            seen[key] += 1
            file.write(json.dumps(row) + "\n")
