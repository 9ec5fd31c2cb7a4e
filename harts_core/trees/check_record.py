"""Every check between a file's record and a trajectory: numbers, lengths, padding, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from harts_core.errors import DataError
from harts_core.trees.build import Trajectory
from harts_core.trees.findings import Findings
from harts_core.trees.formats.record import RawRecord
from harts_core.trees.numbers import float_array, integer, integer_array, mask_array, name_string

ZERO_RUN = 8
"""This many consecutive log-probs of exactly 0.0 under a true mask look like filler."""
SENTINEL = -9999.0
NO_TRAINED_POSITION = "no trained position"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What the checks allow.

    Attributes:
        vocab_size: token ids must be below it; None: not known.
        on_nonfinite: "error", or "drop": positions with a non-finite value are not trained.
    """

    vocab_size: int | None = None
    on_nonfinite: Literal["error", "drop"] = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRecord:
    """A trajectory, and the rollout that it is a step or a branch of."""

    trajectory: Trajectory
    rollout_id: str


def check_record(
    raw: RawRecord, name: str, where: str, options: CheckOptions, findings: Findings
) -> CheckedRecord | None:
    """The trajectory of a raw record; None when it has no trained position (counted).

    Ids: a row of a rollout with step k is named ``rollout#k``, a branch b ``rollout/b``; a rollout without
    an id has the record's ``name``, and a row without a group has its rollout's id as group.

    Args:
        raw: the record.
        name: the record's default id ("file.jsonl:7").
        where: file, record and part, for messages.
        options: limits.
        findings: counts drops and warnings.

    Raises:
        DataError: anything wrong with the record; the field is named.
    """
    tokens, keep = _tokens(raw, where, options, findings)
    positions = _trained_padded(raw, keep, where, findings)
    values: dict[str, npt.NDArray[np.float32] | None] = {}
    for field in ("old_logprobs", "ref_logprobs", "advantages"):
        values[field] = _aligned(raw, field, keep, positions, where, findings)
    trained = positions
    if raw.attention_mask is not None:
        trained = (np.cumsum(keep) - 1)[positions]  # positions without padding
    if len(trained) and trained[0] == 0:
        findings.warn("position 0 has no tokens before it and is not trained", where)
        trained = trained[1:]
        values = {f: v if v is None or _is_scalar(f, v, positions) else v[1:] for f, v in values.items()}
    trained, values = _finite(trained, values, where, options, findings)
    if len(trained) == 0:
        findings.drop(NO_TRAINED_POSITION, where)
        return None
    for field in ("old_logprobs", "ref_logprobs"):
        _check_logprobs(values[field], field, trained, where, findings)
    step = integer(raw.step, "step", where, findings)
    trajectory_id, rollout_id = _ids(raw, name, step, where)
    trajectory = Trajectory(
        trajectory_id=trajectory_id,
        group_id=name_string(raw.group_id, "group_id", where) or rollout_id,
        tokens=tokens,
        loss_spans=_spans(trained),
        old_logprobs=values["old_logprobs"],
        ref_logprobs=values["ref_logprobs"],
        advantages=values["advantages"],
        reward=_reward(raw.reward, where, findings),
        step=step,
        policy_version=_version(raw.policy_version, where, findings),
    )
    return CheckedRecord(trajectory=trajectory, rollout_id=rollout_id)


def _tokens(
    raw: RawRecord, where: str, options: CheckOptions, findings: Findings
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """(tokens without padding, which of the padded ones they are)."""
    tokens = integer_array(raw.tokens, "tokens", where, findings)
    keep = np.ones(len(tokens), np.bool_)
    if raw.attention_mask is not None:
        keep = mask_array(raw.attention_mask, "attention_mask", where, findings)
        if len(keep) != len(tokens):
            raise DataError(f"attention_mask has {len(keep)} values for {len(tokens)} tokens", where=where)
        tokens = tokens[keep]
    if len(tokens) == 0:
        raise DataError("tokens is empty", where=where)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0:
        raise DataError(f"tokens holds the negative id {low} at index {int(tokens.argmin())}", where=where)
    limit = 2**31 if options.vocab_size is None else options.vocab_size
    if high >= limit:
        what = (
            f"tokens holds id {high} at index {int(tokens.argmax())}, not below the vocabulary size {limit}"
        )
        raise DataError(what, where=where)
    return tokens.astype(np.int32, copy=False), keep


def _trained_padded(
    raw: RawRecord, keep: npt.NDArray[np.bool_], where: str, findings: Findings
) -> npt.NDArray[np.int64]:
    """Trained positions in padded coordinates."""
    num_tokens = len(keep)
    if raw.loss_spans is not None:
        return _positions_of_spans(raw.loss_spans, num_tokens, where, findings)
    if raw.response_length is not None and raw.response_length > num_tokens:
        what = f"the response has {raw.response_length} tokens of {num_tokens} in all"
        raise DataError(what, where=where)
    if raw.loss_mask is None:
        start = num_tokens - (raw.response_length or 0)
        return np.flatnonzero(keep[start:]) + start
    mask = mask_array(raw.loss_mask, "loss_mask", where, findings)
    if len(mask) == num_tokens:
        return np.flatnonzero(mask & keep)
    if raw.response_length is not None and len(mask) == raw.response_length:
        start = num_tokens - len(mask)
        return np.flatnonzero(mask & keep[start:]) + start
    raise DataError(f"loss_mask has {len(mask)} values for {_expected(raw, num_tokens, None)}", where=where)


def _expected(raw: RawRecord, num_tokens: int, num_trained: int | None) -> str:
    parts = [f"{num_tokens} tokens"]
    if raw.response_length is not None and raw.response_length != num_tokens:
        parts.append(f"{raw.response_length} response tokens")
    if num_trained is not None:
        parts.append(f"{num_trained} trained positions")
    return " or ".join(parts)


def _positions_of_spans(spans: Any, num_tokens: int, where: str, findings: Findings) -> npt.NDArray[np.int64]:
    if not isinstance(spans, list | tuple | np.ndarray):
        raise DataError(f"loss_spans is {type(spans).__name__}, not a list of start, stop pairs", where=where)
    flat: list[Any] = []
    for span in spans:
        pair = [span.get("start"), span.get("stop")] if isinstance(span, dict) else span
        if not isinstance(pair, list | tuple | np.ndarray) or len(pair) != 2:
            raise DataError("loss_spans must hold start, stop pairs", where=where)
        flat += list(pair)
    bounds = integer_array(flat, "loss_spans", where, findings).reshape(-1, 2)
    if len(bounds):
        apart = bool((bounds[1:, 0] >= bounds[:-1, 1]).all() and (bounds[:, 0] < bounds[:, 1]).all())
        if not apart or bounds[0, 0] < 0 or bounds[-1, 1] > num_tokens:
            what = f"loss_spans must be sorted, disjoint, non-empty and inside [0, {num_tokens})"
            raise DataError(what, where=where)
    return np.concatenate([np.empty(0, np.int64), *(np.arange(a, b) for a, b in bounds.tolist())])


def _is_scalar(field: str, value: npt.NDArray[np.float32], positions: npt.NDArray[np.int64]) -> bool:
    return field == "advantages" and len(value) == 1 != len(positions)


def _aligned(
    raw: RawRecord,
    field: str,
    keep: npt.NDArray[np.bool_],
    positions: npt.NDArray[np.int64],
    where: str,
    findings: Findings,
) -> npt.NDArray[np.float32] | None:
    """float32, one value per trained position (or one advantage in all); which layout, by length."""
    value = getattr(raw, field)
    if value is None:
        return None
    if not isinstance(value, list | tuple | np.ndarray | str) and field == "advantages":
        value = [value]
    array = float_array(value, field, where, findings)
    num_tokens, size = len(keep), len(array)
    if size == num_tokens:
        array = array[positions]
    elif size == raw.response_length and (not len(positions) or positions[0] >= num_tokens - size):
        array = array[positions - (num_tokens - size)]
    elif size != len(positions) and not (field == "advantages" and size == 1):
        what = f"{field} has {size} values for {_expected(raw, num_tokens, len(positions))}"
        raise DataError(
            what, where=where, hint="one value per token, per response token or per trained token"
        )
    with np.errstate(over="ignore"):  # a double beyond float32 becomes infinity, which _finite reports
        return array.astype(np.float32)


def _finite(
    trained: npt.NDArray[np.int64],
    values: dict[str, npt.NDArray[np.float32] | None],
    where: str,
    options: CheckOptions,
    findings: Findings,
) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[np.float32] | None]]:
    """Trained positions and values without those that are NaN, infinite or null."""
    bad = np.zeros(len(trained), np.bool_)
    for field, value in values.items():
        if value is None or np.isfinite(value).all():
            continue
        wrong = np.broadcast_to(~np.isfinite(value), bad.shape)
        if options.on_nonfinite == "error" and wrong.any():
            what = (
                f"{field} is NaN, infinite or null at {int(wrong.sum())} of {len(trained)} trained positions,"
                f" first at position {int(trained[wrong][0])}"
            )
            raise DataError(what, where=where, hint="--on-nonfinite drop leaves these positions untrained")
        bad |= wrong
    if bad.any():
        findings.drop("non-finite value (positions)", where, int(bad.sum()))
        size = len(bad)
        values = {f: v[~bad] if v is not None and len(v) == size else v for f, v in values.items()}
        trained = trained[~bad]
    return trained, values


def _check_logprobs(
    value: npt.NDArray[np.float32] | None,
    field: str,
    trained: npt.NDArray[np.int64],
    where: str,
    findings: Findings,
) -> None:
    """Refuse values above 0; count values that look like filler."""
    if value is None:
        return
    above = np.flatnonzero(value > 0)
    if len(above):
        first = int(above[0])
        filler = " (1.0 is a common filler)" if value[first] == 1 else ""
        what = (
            f"{field} is {value[first]:g}{filler}, above 0, at {len(above)} trained positions,"
            f" first at position {int(trained[first])}"
        )
        raise DataError(what, where=where, hint="check that log-probs belong to these tokens, unshifted")
    low = int((value <= SENTINEL).sum())
    if low:
        findings.warn(f"{field}: {SENTINEL:g} or less at trained positions", where, low)
    zero = np.concatenate([[False], value == 0, [False]])
    edges = np.flatnonzero(np.diff(zero.astype(np.int8))).reshape(-1, 2)
    runs = edges[:, 1] - edges[:, 0]
    long = int(runs[runs >= ZERO_RUN].sum())
    if long:
        findings.warn(f"{field}: runs of {ZERO_RUN} or more exact zeros at trained positions", where, long)


def _spans(trained: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """int32 [n, 2], the maximal runs of consecutive positions."""
    cut = np.flatnonzero(np.diff(trained) != 1) + 1
    starts = trained[np.concatenate([[0], cut])]
    stops = trained[np.concatenate([cut - 1, [len(trained) - 1]])] + 1
    return np.stack([starts, stops], 1).astype(np.int32)


def _ids(raw: RawRecord, name: str, step: int | None, where: str) -> tuple[str, str]:
    """(trajectory_id, rollout_id). An id that already ends in its step keeps it, so exports read back."""
    rollout = name_string(raw.rollout_id, "trajectory_id", where) or name
    trajectory = rollout if not raw.branch else f"{rollout}/{raw.branch}"
    if step is None:
        return trajectory, rollout
    suffix = f"#{step}"
    if rollout.endswith(suffix) and not raw.branch:
        return rollout, rollout.removesuffix(suffix) or rollout
    return trajectory + suffix, rollout


def _reward(value: Any, where: str, findings: Findings) -> float | None:
    if value is None:
        return None
    if isinstance(value, list | tuple | np.ndarray):
        array = float_array(value, "reward", where, findings)
        if len(array) != 1:
            findings.warn("reward: token-level rewards summed", where)
        number = float(array.sum())
    else:
        number = float(float_array([value], "reward", where, findings)[0])
    with np.errstate(over="ignore"):
        finite = np.isfinite(np.float32(number))
    if not finite:
        raise DataError(f"reward is {number:g}, not a finite number", where=where)
    return number


def _version(value: Any, where: str, findings: Findings) -> int | None:
    """One version, or the maximum of per-token ones (−1: not generated)."""
    if isinstance(value, list | tuple | np.ndarray):
        array = integer_array(value, "policy_version", where, findings)
        high = int(array.max()) if len(array) else -1
        return None if high < 0 else integer(high, "policy_version", where, findings)
    return integer(value, "policy_version", where, findings)
