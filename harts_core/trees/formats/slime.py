"""slime ``--save-debug-rollout-data`` files: ``{"rollout_id", "samples": [...]}`` saved with torch.

The container is read by :mod:`harts_core.trees.sources.torch_records`; ``rollout_id`` is the training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harts_core.errors import DataError
from harts_core.trees.formats.record import (
    Format,
    RawRecord,
    ReadOptions,
    required_list,
    required_mapping,
    reward_entry,
)
from harts_core.trees.numbers import name_string

UNVERSIONED = "default"
"""What the inference server calls weights that were never updated."""


def sniff(record: Mapping[str, Any]) -> bool:
    """Whether the record is a rollout dump."""
    return {"rollout_id", "samples"} <= record.keys()


def read(record: Mapping[str, Any], name: str, options: ReadOptions) -> Iterator[RawRecord]:
    """One trajectory per sample; group and trajectory are numbered inside the training step."""
    step = name_string(record.get("rollout_id"), "rollout_id", "") or name
    for i, value in enumerate(required_list(record, "samples")):
        part = f"sample {i}"
        sample = required_mapping(value, "samples", part)
        length = sample.get("response_length")
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise DataError(f"response_length is {length!r}, not a length", where=part)
        index = name_string(sample.get("index", sample.get("rollout_id")), "index", part)
        group = name_string(sample.get("group_index"), "group_index", part)
        versions: list[Any] = []
        if sample.get("weight_versions") is not None:
            versions = [v for v in required_list(sample, "weight_versions", part) if v != UNVERSIONED]
        yield RawRecord(
            tokens=sample.get("tokens"),
            part=part,
            response_length=length,
            loss_mask=sample.get("loss_mask"),
            loss_spans=[] if sample.get("remove_sample") else None,
            old_logprobs=sample.get("rollout_log_probs"),
            reward=reward_entry(sample.get("reward"), options.reward_key, part),
            group_id=None if group is None else f"{step}/{group}",
            rollout_id=f"{step}/{i if index is None else index}",
            policy_version=versions or None,
        )


FORMAT = Format(
    name="slime", summary="slime --save-debug-rollout-data .pt (needs torch)", sniff=sniff, read=read
)
