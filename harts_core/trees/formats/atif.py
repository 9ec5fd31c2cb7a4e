"""ATIF (agent trajectory interchange format) with token ids in the agent steps' metrics, one row per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harts_core.errors import DataError
from harts_core.trees.formats.harbor import turn_record
from harts_core.trees.formats.record import Format, RawRecord, ReadOptions, required_list, required_mapping


def sniff(record: Mapping[str, Any]) -> bool:
    """Whether the record says that it is ATIF."""
    return str(record.get("schema_version", "")).startswith("ATIF") and "steps" in record


def read(record: Mapping[str, Any], name: str, options: ReadOptions) -> Iterator[RawRecord]:
    """One row per agent step; a step whose context was copied from elsewhere is not trained."""
    for i, value in enumerate(required_list(record, "steps")):
        part = f"step {i}"
        step = required_mapping(value, "steps", part)
        if step.get("source") != "agent":
            continue
        metrics = required_mapping(step.get("metrics") or {}, "metrics", part)
        if metrics.get("prompt_token_ids") is None or metrics.get("completion_token_ids") is None:
            raise DataError(
                "metrics has no prompt_token_ids and completion_token_ids",
                where=part,
                hint="have the agent record token ids (Harbor: collect_rollout_details)",
            )
        raw = turn_record(
            metrics["prompt_token_ids"],
            metrics["completion_token_ids"],
            metrics.get("logprobs"),
            part,
            rollout_id=record.get("session_id") or record.get("trajectory_id"),
            step=step.get("step_id", i),
        )
        if step.get("is_copied_context"):
            raw.loss_spans = []
        yield raw


FORMAT = Format(name="atif", summary="ATIF trajectories with token ids in metrics", sniff=sniff, read=read)
