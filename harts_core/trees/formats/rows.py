"""HARTS rows: one record per trajectory or step, in the field names of the common RL frameworks.

Covers HARTS's own names and those that verl (DataProto), AReaL, SkyRL, TRL, OpenRLHF and slime use for the
same things. The first alias that a record has (and that is not null) counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from harts_core.errors import DataError
from harts_core.trees.formats.record import Format, RawRecord, ReadOptions, lookup
from harts_core.trees.numbers import TEXT_HINT, flat_array

ALIASES: dict[str, tuple[str, ...]] = {
    "tokens": ("tokens", "input_ids", "token_ids", "sequences"),
    "prompt": ("prompt_ids", "prompt_token_ids", "prompts"),
    "response": ("response_ids", "completion_ids", "response_token_ids", "responses"),
    "response_length": ("response_length",),
    "attention_mask": ("attention_mask",),
    "loss_spans": ("loss_spans",),
    "loss_mask": (
        "loss_mask",
        "loss_masks",
        "response_mask",
        "action_mask",
        "assistant_mask",
        "env_mask",
    ),
    "old_logprobs": (
        "old_logprobs",
        "old_log_probs",
        "rollout_log_probs",
        "response_logprobs",
        "rollout_logprobs",
        "logprobs",
    ),
    "ref_logprobs": ("ref_logprobs", "ref_log_prob", "base_action_log_probs"),
    "advantages": ("advantages", "advantage"),
    "reward": ("reward", "rewards", "reward_score", "score"),
    "group_id": ("group_id", "uid", "prompt_id", "data_id", "instance_id"),
    "trajectory_id": ("trajectory_id", "rollout_id", "id", "request_id"),
    "repetition": ("repetition_id",),
    "step": ("step", "step_index", "turn"),
    "policy_version": ("policy_version", "version", "weight_version", "versions"),
    "tokenizer": ("tokenizer",),
    "vocab_size": ("vocab_size",),
    "sampling": ("sampling",),
}
"""HARTS field → accepted names, best first."""

RESPONSE_MASKS = ("response_mask", "action_mask")
"""Masks that cover the response alone where they are shorter than the tokens."""


def sniff(record: Mapping[str, Any]) -> bool:
    """Whether the record has tokens, or a prompt and a response part."""

    def has(field: str) -> bool:
        return any(name in record for name in ALIASES[field])

    return has("tokens") or (has("prompt") and has("response"))


def read(record: Mapping[str, Any], name: str, options: ReadOptions) -> Iterator[RawRecord]:
    """The one trajectory of a record."""

    def find(field: str) -> tuple[str, Any]:
        """(name, value) of a field: the mapped one, or the first alias that is not null; else ("", None)."""
        if field in options.fields:
            name = options.fields[field]
            if (value := lookup(record, name)) is None:
                raise DataError(f"{name} (mapped to {field}) is missing or null")
            return name, value
        for name in ALIASES[field]:
            if name in record and (value := record[name]) is not None:
                return name, value
        return "", None

    def pick(field: str) -> Any:
        return find(field)[1]

    tokens, prompt, response = pick("tokens"), pick("prompt"), pick("response")
    if tokens is None:
        if prompt is None or response is None:
            raise DataError(
                "no token ids: none of "
                + ", ".join(ALIASES["tokens"])
                + ", nor a prompt and a response part",
                hint="name the field with --map tokens=NAME",
            )
        tokens = np.concatenate([_part(prompt, "prompt"), _part(response, "response")])
    (mask_name, mask), spans = find("loss_mask"), pick("loss_spans")
    length = _response_length(response, pick("response_length"))
    if length is None and mask is not None and mask_name in RESPONSE_MASKS:
        length = len(flat_array(mask, "loss_mask", ""))
    if mask is None and spans is None and length is None:
        raise DataError(
            "no loss mask: none of " + ", ".join(ALIASES["loss_mask"]) + ", loss_spans",
            hint="name the field with --map loss_mask=NAME",
        )
    group, rollout = pick("group_id"), pick("trajectory_id")
    repetition = pick("repetition")
    if rollout is None and group is not None and repetition is not None:
        rollout = f"{group}/{repetition}"
    yield RawRecord(
        tokens=tokens,
        response_length=length,
        attention_mask=pick("attention_mask"),
        loss_mask=mask,
        loss_spans=spans,
        old_logprobs=pick("old_logprobs"),
        ref_logprobs=pick("ref_logprobs"),
        advantages=pick("advantages"),
        reward=pick("reward"),
        group_id=group,
        rollout_id=rollout,
        step=pick("step"),
        policy_version=pick("policy_version"),
        tokenizer=pick("tokenizer"),
        vocab_size=pick("vocab_size"),
        sampling=pick("sampling"),
    )


def _response_length(response: Any, stated: Any) -> int | None:
    """How many trailing tokens are the response, by its own part or by a length field."""
    if response is not None and not isinstance(response, str):
        return len(_part(response, "response"))
    if stated is not None and (isinstance(stated, bool) or not isinstance(stated, int) or stated < 0):
        raise DataError(f"response_length is {stated!r}, not a length")
    return None if stated is None else int(stated)


def _part(value: Any, field: str) -> Any:
    if isinstance(value, str):
        raise DataError(f"{field} is text, not token ids", hint=TEXT_HINT)
    array = flat_array(value, field, "")
    # An empty list has no type of its own; it must not turn its neighbour's integers into floats.
    return array.astype(np.int64) if array.size == 0 else array


FORMAT = Format(
    name="rows",
    summary="one trajectory or step per record, HARTS's or a framework's field names",
    sniff=sniff,
    read=read,
)
