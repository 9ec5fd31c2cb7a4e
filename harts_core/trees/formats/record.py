"""What a format reader makes of a file's record: one trajectory, names resolved, values unchecked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harts_core.errors import DataError


@dataclass(slots=True, kw_only=True)
class RawRecord:
    """One trajectory as its file states it. ``check_record`` checks and aligns every value.

    Attributes:
        tokens: the whole sequence (padded where ``attention_mask`` is given).
        part: which part of the file's record it is ("trace 0, path 2"); empty for the record itself.
        response_length: how many trailing tokens are the response; None: not known.
        attention_mask: 1 where ``tokens`` is not padding; None: no padding.
        loss_mask: one value per token or per response token; None (and no spans): the response is trained.
        loss_spans: start, stop pairs or {start, stop} objects; wins over ``loss_mask``.
        old_logprobs, ref_logprobs: one value per token, per response token, or per trained position.
        advantages: likewise, or one number.
        reward: a number, or token-level rewards, which are summed.
        group_id, rollout_id, step, policy_version: see :class:`~harts_core.trees.build.Trajectory`.
        branch: appended to the rollout's id where one rollout has several paths.
        tokenizer, vocab_size, sampling: what the file says of itself.
    """

    tokens: Any
    part: str = ""
    response_length: int | None = None
    attention_mask: Any = None
    loss_mask: Any = None
    loss_spans: Any = None
    old_logprobs: Any = None
    ref_logprobs: Any = None
    advantages: Any = None
    reward: Any = None
    group_id: Any = None
    rollout_id: Any = None
    branch: str = ""
    step: Any = None
    policy_version: Any = None
    tokenizer: Any = None
    vocab_size: Any = None
    sampling: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What readers need from the command line.

    Attributes:
        fields: HARTS field → the record's own (dotted) name, from ``--map``.
        reward_key: which entry of a dict of rewards is the reward.
        tokenizer: ``tokenizer.json``, a directory, or a name, for text.
        sampling: how rollouts of messages become rows.
        vocab_size: the model's, which may be larger than the tokenizer's.
    """

    fields: Mapping[str, str]
    reward_key: str | None = None
    tokenizer: str | None = None
    sampling: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A file format: how to know it, and how to read one of its records.

    Attributes:
        name: as in ``--format``.
        summary: one line for the documentation.
        sniff: whether a record (only its keys and small values need be looked at) is of this format.
        read: the trajectories of one record; ``name`` names the record ("file.jsonl:7") where it has no id.
            Raises DataError without ``where`` other than the part inside the record.
    """

    name: str
    summary: str
    sniff: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], str, ReadOptions], Iterator[RawRecord]]


def lookup(record: Mapping[str, Any], name: str) -> Any:
    """The value under a name, or under a dotted path (``task.data.idx``); None when absent."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def required_list(record: Mapping[str, Any], name: str, part: str = "") -> list[Any]:
    """A list-valued field.

    Raises:
        DataError: absent or not a list.
    """
    value = record.get(name)
    if not isinstance(value, list):
        state = "is missing" if value is None else f"is {type(value).__name__}, not a list"
        raise DataError(f"{name} {state}", where=part or None)
    return value


def required_mapping(value: Any, name: str, part: str = "") -> Mapping[str, Any]:
    """An object-valued field.

    Raises:
        DataError: not an object.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{name} is {type(value).__name__}, not an object", where=part or None)
    return value


def reward_entry(rewards: Any, key: str | None, part: str) -> Any:
    """A reward, or the entry of a dict of rewards that counts.

    Raises:
        DataError: the dict lacks the key, or has several entries and none is named.
    """
    if not isinstance(rewards, Mapping):
        return rewards
    if key is None and len(rewards) == 1:
        return next(iter(rewards.values()))
    if not rewards:
        return None
    if key is None or key not in rewards:
        what = f"rewards has the entries {', '.join(map(str, rewards))}"
        raise DataError(what, where=part or None, hint="choose one with --reward-key")
    return rewards[key]
