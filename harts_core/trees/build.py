"""Building a rollout tree: trajectories in any order, sorted and front-coded in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from harts_core.errors import DataError
from harts_core.trees.merge import Run, merge_runs, sort_rows
from harts_core.trees.ragged import Ragged, offsets_from_lengths
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import finish_tree

BUFFER_TOKENS = 24 * 2**20
"""Raw tokens held before they are sorted and front-coded: 96 MiB."""

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One complete token sequence with its labels and RL metadata.

    Attributes:
        trajectory_id: unique name.
        group_id: the prompt group that its advantage is relative to.
        tokens: int32 [T], T ≥ 1, ids ≥ 0.
        loss_spans: int32 [n, 2], sorted, disjoint, half-open trained spans in [1, T).
        old_logprobs, ref_logprobs: float32, one per trained position, or None.
        advantages: float32, one per trained position or one in all, or None.
        reward: finite, or None.
        step: index of a step-wise sample in its rollout, or None.
        policy_version: version of the weights that sampled it, or None.

    Array fields accept any sequence of numbers and are converted (exactly, for integers).

    Raises:
        DataError: a field breaks these rules; the trajectory and the field are named.
    """

    trajectory_id: str
    group_id: str
    tokens: npt.NDArray[np.int32]
    loss_spans: npt.NDArray[np.int32]
    old_logprobs: npt.NDArray[np.float32] | None = None
    ref_logprobs: npt.NDArray[np.float32] | None = None
    advantages: npt.NDArray[np.float32] | None = None
    reward: float | None = None
    step: int | None = None
    policy_version: int | None = None

    def __post_init__(self) -> None:
        tokens = self._integers("tokens", self.tokens)
        if tokens.ndim != 1 or len(tokens) == 0:
            raise self._error("tokens must be a non-empty flat list")
        if int(tokens.min()) < 0:
            raise self._error(f"negative token id {int(tokens.min())}")
        spans = self._integers("loss_spans", self.loss_spans)
        if spans.size % 2:
            raise self._error("loss_spans must hold start, stop pairs")
        spans = spans.reshape(-1, 2)
        if len(spans):
            rising = spans[:, 0] < spans[:, 1]
            apart = spans[1:, 0] >= spans[:-1, 1]
            if spans[0, 0] < 1 or spans[-1, 1] > len(tokens) or not rising.all() or not apart.all():
                raise self._error("loss_spans must be sorted, disjoint, non-empty and inside [1, length)")
        trained = int((spans[:, 1] - spans[:, 0]).sum(dtype=np.int64))
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "loss_spans", spans)
        for name in ("old_logprobs", "ref_logprobs", "advantages"):
            value = getattr(self, name)
            if value is None:
                continue
            with np.errstate(over="ignore"):  # becomes infinity, which is refused below
                value = np.atleast_1d(np.asarray(value, np.float32))
            if len(value) != trained and not (name == "advantages" and len(value) == 1):
                raise self._error(f"{name} has {len(value)} values for {trained} trained positions")
            if not np.isfinite(value).all():
                raise self._error(f"{name} is not finite")
            object.__setattr__(self, name, value)
        with np.errstate(over="ignore"):
            if self.reward is not None and not np.isfinite(np.float32(self.reward)):
                raise self._error("reward is not finite")
        for name in ("step", "policy_version"):
            value = getattr(self, name)
            if value is not None and not -INT32_MAX <= value <= INT32_MAX:
                raise self._error(f"{name} {value} does not fit 32 bits")

    def _error(self, what: str) -> DataError:
        return DataError(what, where=f"trajectory {self.trajectory_id}")

    def _integers(self, name: str, value: Any) -> npt.NDArray[np.int32]:
        array = np.asarray(value)
        if array.dtype == np.int32:
            return np.ascontiguousarray(array)
        if array.size == 0:
            return np.empty(0, np.int32)
        if array.dtype.kind not in "iu" or int(array.max()) > INT32_MAX or int(array.min()) < -INT32_MAX:
            raise self._error(f"{name} must hold 32-bit integers")
        return np.ascontiguousarray(array, np.int32)


class TreeBuilder:
    """Collects trajectories in any order; the finished tree does not depend on that order.

    Tokens wait in a bounded buffer; a full buffer is sorted and front-coded to a run, of which only the
    trie tokens stay, and runs of similar size are merged. Peak memory is the buffer, a small multiple of the
    trie, and the rows' metadata; never the input.

    Args:
        duplicate_ids: ``"error"`` refuses a trajectory_id seen before; ``"suffix"`` renames the second,
            third, … row of an id (in row order) to ``id~2``, ``id~3``, ….
        buffer_tokens: tokens held before a run is made.
    """

    def __init__(
        self, *, duplicate_ids: Literal["error", "suffix"] = "error", buffer_tokens: int = BUFFER_TOKENS
    ) -> None:
        self._suffix_ids = duplicate_ids == "suffix"
        self._buffer_tokens = buffer_tokens
        self._buffer = np.empty(0, np.int32)
        self._used = 0
        self._lengths: list[int] = []  # of the rows in the buffer
        self._runs: list[Run] = []
        self._rows: list[Trajectory] = []  # without tokens: metadata only
        self._ids: set[str] = set()
        self.order: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """int64 [N] after :meth:`finish`: the how-manieth added trajectory each row of the tree is."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, trajectory: Trajectory) -> None:
        """Take one trajectory; its arrays are copied.

        Raises:
            DataError: its trajectory_id was added before (and ids are not suffixed).
        """
        if trajectory.trajectory_id in self._ids and not self._suffix_ids:
            raise DataError(
                f"trajectory_id {trajectory.trajectory_id!r} appears twice",
                hint="make ids unique, or rename repeats with --duplicate-ids suffix",
            )
        self._ids.add(trajectory.trajectory_id)
        size = len(trajectory.tokens)
        if self._used + size > len(self._buffer):
            self._make_room(size)
        self._buffer[self._used : self._used + size] = trajectory.tokens
        self._used += size
        self._lengths.append(size)
        self._rows.append(_without_tokens(trajectory))

    def finish(self, metadata: Mapping[str, Any] | None = None) -> RolloutTree:
        """The checked tree of everything added; the builder is empty afterwards.

        Args:
            metadata: ``vocab_size``, ``tokenizer``, ``sampling``, ``sources``, … for the tree's metadata.

        Raises:
            DataError: nothing was added, or a token id is not below ``metadata["vocab_size"]``.
        """
        self._flush()
        if not self._runs:
            raise DataError("no trajectories", hint="add at least one")
        self._buffer = np.empty(0, np.int32)
        while len(self._runs) > 1:
            self._merge_last_two()
        run = self._runs.pop()
        rows, self._rows = self._rows, []
        self._ids = set()
        order = _order_ties(run, rows)
        ids = _unique_ids([rows[i].trajectory_id for i in order]) if self._suffix_ids else None
        if ids is not None:  # renaming may change the order among rows of equal tokens
            for row, i in zip(ids, order.tolist(), strict=True):
                object.__setattr__(rows[i], "trajectory_id", row)
            order = _order_ties(run, rows)
        self.order = order
        return finish_tree(_assemble(run, [rows[i] for i in order], metadata or {}), "rollout tree")

    def _make_room(self, size: int) -> None:
        """Space for ``size`` more tokens: what is there is sorted away, then the buffer made if need be."""
        self._flush()
        if size > len(self._buffer):  # untouched pages of a new buffer cost nothing
            self._buffer = np.empty(max(size, self._buffer_tokens), np.int32)

    def _flush(self) -> None:
        if not self._lengths:
            return
        offsets = offsets_from_lengths(np.array(self._lengths, np.int64))
        first = len(self._rows) - len(self._lengths)
        source = np.arange(first, len(self._rows), dtype=np.int64)
        self._runs.append(sort_rows(self._buffer[: self._used], offsets, source))
        self._used, self._lengths = 0, []
        # Sizes fall by half from run to run: O(log) merges per token, and little stored twice.
        while len(self._runs) > 1 and len(self._runs[-2].values) <= 2 * len(self._runs[-1].values):
            self._merge_last_two()

    def _merge_last_two(self) -> None:
        b, a = self._runs.pop(), self._runs.pop()
        self._runs.append(merge_runs(a, b))


def build_tree(trajectories: Iterable[Trajectory], metadata: Mapping[str, Any] | None = None) -> RolloutTree:
    """The rollout tree of trajectories in any order.

    Example::

        rows = [Trajectory(trajectory_id="a", group_id="g", tokens=[1, 2, 3], loss_spans=[(1, 3)])]
        tree = build_tree(rows)

    Raises:
        DataError: no trajectories, a duplicate trajectory_id, or an id not below the vocabulary size.
    """
    builder = TreeBuilder()
    for trajectory in trajectories:
        builder.add(trajectory)
    return builder.finish(metadata)


_NO_TOKENS = np.empty(0, np.int32)


def _without_tokens(trajectory: Trajectory) -> Trajectory:
    """Its metadata, arrays copied (they may be views of a large batch), checks not repeated."""
    row = object.__new__(Trajectory)
    for name in Trajectory.__slots__:
        value = getattr(trajectory, name)
        if name == "tokens":
            value = _NO_TOKENS
        elif isinstance(value, np.ndarray):
            value = value.copy()
        object.__setattr__(row, name, value)
    return row


def _order_ties(run: Run, rows: list[Trajectory]) -> npt.NDArray[np.int64]:
    """The run's sources, rows of equal tokens put in order of trajectory_id (then of their metadata)."""
    order = run.source.copy()
    same = np.zeros(len(order), np.bool_)
    same[1:] = (run.lcp[1:] == run.length[1:]) & (run.length[1:] == run.length[:-1])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    for first, stop in edges.reshape(-1, 2).tolist():
        block = order[first - 1 : stop].tolist()
        order[first - 1 : stop] = sorted(block, key=lambda i: _tie_key(rows[i]))
    return order


def _tie_key(row: Trajectory) -> tuple[str, ...]:
    """Orders rows of equal tokens: by id, then (for repeated ids) by everything else."""
    rest = (row.group_id, row.step, row.policy_version, row.reward)
    arrays = (row.loss_spans, row.old_logprobs, row.ref_logprobs, row.advantages)
    return (row.trajectory_id, repr(rest), *("" if a is None else a.tobytes().hex() for a in arrays))


def _unique_ids(ids: list[str]) -> list[str]:
    """The same ids, the k-th occurrence of one (k ≥ 2) renamed to the first free ``id~k``."""
    taken, seen, out = set(ids), dict.fromkeys(ids, 0), []
    for name in ids:
        seen[name] += 1
        unique = name
        if seen[name] > 1:
            while (unique := f"{name}~{seen[name]}") in taken:
                seen[name] += 1
            taken.add(unique)
        out.append(unique)
    return out


def _assemble(run: Run, rows: list[Trajectory], metadata: Mapping[str, Any]) -> RolloutTree:
    """The columns of a tree from a run and its rows' metadata, in row order."""

    def ragged(name: str) -> Ragged | None:
        values = [getattr(row, name) for row in rows]
        return None if all(v is None for v in values) else Ragged.from_rows(values, np.float32)

    def integers(name: str) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.bool_] | None]:
        values = [getattr(row, name) for row in rows]
        valid = np.array([v is not None for v in values])
        if not valid.any():
            return None, None
        filled = np.array([0 if v is None else v for v in values], np.int32)
        return filled, None if valid.all() else valid

    rewards = [row.reward for row in rows]
    step, step_valid = integers("step")
    version, version_valid = integers("policy_version")
    kept = offsets_from_lengths(run.length.astype(np.int64) - run.lcp)
    return RolloutTree(
        trajectory_id=tuple(row.trajectory_id for row in rows),
        group_id=tuple(row.group_id for row in rows),
        length=run.length,
        lcp=run.lcp,
        suffix=Ragged(offsets=kept, values=run.values),
        loss_spans=Ragged.from_rows([row.loss_spans.ravel() for row in rows], np.int32),
        old_logprobs=ragged("old_logprobs"),
        ref_logprobs=ragged("ref_logprobs"),
        advantages=ragged("advantages"),
        reward=None
        if all(r is None for r in rewards)
        else np.array([np.nan if r is None else r for r in rewards], np.float32),
        step=step,
        step_valid=step_valid,
        policy_version=version,
        policy_version_valid=version_valid,
        metadata=dict(metadata),
    )
