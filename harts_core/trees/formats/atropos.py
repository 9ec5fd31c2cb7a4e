"""Atropos scored groups: one group per line, parallel lists over its sequences.

``masks[i][t] != -100`` marks a trained token; ``inference_logprobs`` hold 1.0 as filler where untrained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harts_core.errors import DataError
from harts_core.trees.formats.record import Format, RawRecord, ReadOptions, required_list

UNTRAINED = -100


def sniff(record: Mapping[str, Any]) -> bool:
    """Whether the record is a scored group."""
    return {"tokens", "masks", "scores"} <= record.keys()


def read(record: Mapping[str, Any], name: str, options: ReadOptions) -> Iterator[RawRecord]:
    """The sequences of a group; the group's id is the record's name."""
    tokens, masks = required_list(record, "tokens"), required_list(record, "masks")
    columns: dict[str, list[Any] | None] = {"masks": masks}
    for field in ("inference_logprobs", "ref_logprobs", "advantages", "scores"):
        columns[field] = None if record.get(field) is None else required_list(record, field)
    for field, column in columns.items():
        if column is not None and len(column) != len(tokens):
            raise DataError(f"{field} has {len(column)} entries for {len(tokens)} sequences")
    for i, sequence in enumerate(tokens):
        part = f"sequence {i}"
        mask = masks[i]
        if not isinstance(sequence, list) or not isinstance(mask, list):
            raise DataError("tokens and masks must hold lists", where=part)
        if len(mask) != len(sequence):
            raise DataError(f"masks has {len(mask)} values for {len(sequence)} tokens", where=part)
        entry = {f: None if c is None else c[i] for f, c in columns.items()}
        yield RawRecord(
            tokens=sequence,
            part=part,
            rollout_id=f"{name}/{i}",
            group_id=name,
            loss_mask=[m != UNTRAINED for m in mask],
            old_logprobs=entry["inference_logprobs"],
            ref_logprobs=entry["ref_logprobs"],
            advantages=entry["advantages"],
            reward=entry["scores"],
        )


FORMAT = Format(name="atropos", summary="Atropos scored groups, one per line", sniff=sniff, read=read)
