"""Harbor trial results: ``result.json`` with ``rollout_details``, one row per turn.

Turn t is ``prompt_token_ids[t] + completion_token_ids[t]``; the completion is trained. Several entries of
``rollout_details`` are separate chats of one trial (a main agent and its helpers): branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harts_core.errors import DataError
from harts_core.trees.formats.record import (
    Format,
    RawRecord,
    ReadOptions,
    lookup,
    required_list,
    required_mapping,
    reward_entry,
)


def _details(record: Mapping[str, Any]) -> Any:
    return record.get("rollout_details") or lookup(record, "agent_result.rollout_details")


def sniff(record: Mapping[str, Any]) -> bool:
    """Whether the record is a trial with token ids."""
    return "trial_name" in record and _details(record) is not None


def read(record: Mapping[str, Any], name: str, options: ReadOptions) -> Iterator[RawRecord]:
    """One row per turn of every chat of a trial."""
    details = _details(record)
    if not isinstance(details, list):
        raise DataError("rollout_details is missing or not a list")
    reward = reward_entry(lookup(record, "verifier_result.rewards"), options.reward_key, "")
    for k, value in enumerate(details):
        chat = required_mapping(value, "rollout_details", f"chat {k}")
        prompts = required_list(chat, "prompt_token_ids", f"chat {k}")
        completions = required_list(chat, "completion_token_ids", f"chat {k}")
        logprobs: list[Any] = [None] * len(prompts)
        if chat.get("logprobs") is not None:
            logprobs = required_list(chat, "logprobs", f"chat {k}")
        if not len(prompts) == len(completions) == len(logprobs):
            what = f"{len(prompts)} prompts, {len(completions)} completions and {len(logprobs)} logprobs"
            raise DataError(what, where=f"chat {k}")
        for t, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            part = f"chat {k}, turn {t}"
            yield turn_record(
                prompt,
                completion,
                logprobs[t],
                part,
                rollout_id=record.get("trial_name"),
                branch=str(k) if len(details) > 1 else "",
                group_id=record.get("task_name"),
                step=t,
                reward=reward,
            )


def turn_record(prompt: Any, completion: Any, logprobs: Any, part: str, **fields: Any) -> RawRecord:
    """A row of one model call: prompt and completion ids, the completion trained."""
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise DataError("prompt_token_ids and completion_token_ids must be lists", where=part)
    return RawRecord(
        tokens=prompt + completion,
        part=part,
        response_length=len(completion),
        old_logprobs=logprobs,
        **fields,
    )


FORMAT = Format(
    name="harbor", summary="Harbor trial result.json with rollout_details", sniff=sniff, read=read
)
