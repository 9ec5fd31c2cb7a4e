"""prime-rl ``token_exports/step_N/rank_R.jsonl``: one packed-free sample per line, full-length arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harts_core.trees.formats.record import Format, RawRecord, ReadOptions, required_list


def sniff(record: Mapping[str, Any]) -> bool:
    """Whether the record is a token export (``inference_logprobs`` is prime-rl's own name)."""
    return {"token_ids", "loss_mask", "inference_logprobs"} <= record.keys()


def read(record: Mapping[str, Any], name: str, options: ReadOptions) -> Iterator[RawRecord]:
    """The one trajectory of a line."""
    yield RawRecord(
        tokens=required_list(record, "token_ids"),
        loss_mask=required_list(record, "loss_mask"),
        old_logprobs=record.get("inference_logprobs"),
        advantages=record.get("advantages"),
        reward=record.get("reward"),
        group_id=record.get("group_id"),
        rollout_id=record.get("rollout_id"),
    )


FORMAT = Format(name="prime-rl", summary="prime-rl token_exports JSONL", sniff=sniff, read=read)
