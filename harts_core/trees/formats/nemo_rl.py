"""NeMo-RL ``train_data_step{N}.jsonl``: padded [B, T] arrays (B = 1 in its dumps), no group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harts_core.errors import DataError
from harts_core.trees.formats.record import Format, RawRecord, ReadOptions, required_list


def sniff(record: Mapping[str, Any]) -> bool:
    """Whether the record has NeMo-RL's batch fields."""
    return {"token_ids", "token_loss_mask", "input_lengths"} <= record.keys()


def read(record: Mapping[str, Any], name: str, options: ReadOptions) -> Iterator[RawRecord]:
    """One trajectory per batch entry; padding beyond ``input_lengths`` is cut."""
    tokens, lengths = required_list(record, "token_ids"), required_list(record, "input_lengths")
    masks, sample = required_list(record, "token_loss_mask"), record.get("sample_loss_mask")
    key = "prev_logprobs" if record.get("prev_logprobs") is not None else "generation_logprobs"
    columns = {"token_loss_mask": masks, "input_lengths": lengths, "sample_loss_mask": sample}
    columns |= {n: record.get(n) for n in (key, "reference_policy_logprobs", "advantages", "rewards")}
    for field, column in columns.items():
        if column is not None and (not isinstance(column, list) or len(column) != len(tokens)):
            raise DataError(f"{field} is not a list of {len(tokens)} entries, as token_ids is")
    for b, row in enumerate(tokens):
        part = f"entry {b}" if len(tokens) > 1 else ""
        length = lengths[b]
        if isinstance(length, bool) or not isinstance(length, int) or not isinstance(row, list):
            raise DataError("token_ids must hold lists and input_lengths integers", where=part or None)
        if not 0 <= length <= len(row):
            raise DataError(f"input_lengths is {length} for {len(row)} token_ids", where=part or None)

        def cut(field: str, b: int = b, row: list[Any] = row, length: int = length, part: str = part) -> Any:
            column = columns[field]
            if column is None or not isinstance(column[b], list):
                return None if column is None else column[b]
            if len(column[b]) != len(row):
                raise DataError(
                    f"{field} has {len(column[b])} values for {len(row)} token_ids", where=part or None
                )
            return column[b][:length]

        weight = 1 if sample is None else sample[b]
        if weight not in (0, 1):
            raise DataError(f"sample_loss_mask is {weight!r}; it must be 0 or 1", where=part or None)
        yield RawRecord(
            tokens=row[:length],
            part=part,
            rollout_id=f"{name}/{b}" if len(tokens) > 1 else None,
            loss_mask=cut("token_loss_mask"),
            loss_spans=None if weight else [],
            old_logprobs=cut(key),
            ref_logprobs=cut("reference_policy_logprobs"),
            advantages=cut("advantages"),
            reward=cut("rewards"),
        )


FORMAT = Format(
    name="nemo-rl", summary="NeMo-RL train_data_step{N}.jsonl (padded batches)", sniff=sniff, read=read
)
