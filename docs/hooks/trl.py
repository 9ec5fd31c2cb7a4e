"""TRL: write the rows of a training step for ``harts ingest``.

Call ``dump_rows(outputs, step, "rollouts")`` on what ``GRPOTrainer._generate_and_score_completions`` returns
(override it in a subclass). Prompts repeat ``num_generations`` times: ingest with ``--group-by-prompt``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAMES = {
    "prompt_ids": "prompt_ids",
    "completion_ids": "completion_ids",
    "old_per_token_logps": "old_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "advantages": "advantages",
}


def dump_rows(outputs: dict[str, Any], step: int, folder: str) -> None:
    """Write ``folder/step_<step>.jsonl``, one line per completion."""
    columns = {new: outputs[old].tolist() for old, new in NAMES.items() if outputs.get(old) is not None}
    prompt, completion = outputs["prompt_mask"].tolist(), outputs["completion_mask"].tolist()
    tools = outputs["tool_mask"].tolist() if outputs.get("tool_mask") is not None else completion
    with open(Path(folder) / f"step_{step}.jsonl", "w") as file:
        for i, (before, after) in enumerate(zip(prompt, completion, strict=True)):
            row = {name: values[i] for name, values in columns.items()}
            row |= {"id": f"{step}/{i}", "attention_mask": before + after, "response_mask": tools[i]}
            file.write(json.dumps(row) + "\n")
