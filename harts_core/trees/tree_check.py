"""Invariants of a rollout tree, checked on every build and every read (files are untrusted)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from harts_core.errors import DataError
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree

MAX_LENGTH = 2**31 - 1


def check_tree(tree: RolloutTree, where: str) -> None:
    """Check every invariant of the format.

    Args:
        tree: the tree; its arrays may have any content.
        where: the file name for messages.

    Raises:
        DataError: naming the first row and column that breaks a rule.
    """
    n = tree.num_rows
    sized: dict[str, Any] = {
        "trajectory_id": tree.trajectory_id,
        "group_id": tree.group_id,
        "lcp": tree.lcp,
        "suffix": tree.suffix,
        "loss_spans": tree.loss_spans,
        "old_logprobs": tree.old_logprobs,
        "ref_logprobs": tree.ref_logprobs,
        "advantages": tree.advantages,
        "reward": tree.reward,
        "step": tree.step,
        "policy_version": tree.policy_version,
    }
    for name, column in sized.items():
        if column is not None and len(column) != n:
            raise DataError(f"column {name} has {len(column)} rows, length has {n}", where=where)
    if n == 0:
        raise DataError("no trajectories", where=where)
    if len(set(tree.trajectory_id)) != n:
        raise DataError("trajectory_id is not unique", where=where)
    _check_front_coding(tree, where)
    _check_loss_spans(tree, where)
    trained = tree.trained_counts
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        column = getattr(tree, name)
        if column is not None:
            _check_per_position(column, trained, name, name == "advantages", where)


def _first(where: str, what: str, bad: npt.NDArray[np.bool_]) -> None:
    if bad.any():
        raise DataError(what, where=f"{where}, row {int(np.flatnonzero(bad)[0])}")


def _check_front_coding(tree: RolloutTree, where: str) -> None:
    length, lcp = tree.length.astype(np.int64), tree.lcp.astype(np.int64)
    _first(where, "length must be at least 1", length < 1)
    _first(where, "lcp must be at least 0", lcp < 0)
    if lcp[0] != 0:
        raise DataError("lcp of row 0 must be 0", where=f"{where}, row 0")
    bad = lcp > length
    bad[1:] |= lcp[1:] > length[:-1]
    _first(where, "lcp is larger than this row or the previous one", bad)
    _first(where, "suffix must hold length - lcp tokens", tree.suffix.lengths != length - lcp)
    vocab = tree.metadata.get("vocab_size")
    values = tree.suffix.values
    if len(values) and int(values.min()) < 0:
        raise DataError("negative token id", where=where)
    if vocab is not None and len(values) and int(values.max()) >= int(vocab):
        raise DataError(f"token id {int(values.max())} is not below vocab_size {vocab}", where=where)
    # Order: where rows i - 1 and i part, the previous row has ended or has the smaller token there.
    # A row that ends at the parting while the previous one goes on would be its proper prefix: wrong order.
    inner = np.arange(1, len(length))
    _first(
        where,
        "rows are not in lexicographic order (a prefix after the longer row)",
        np.concatenate([[False], (lcp[inner] == length[inner]) & (length[inner - 1] > length[inner])]),
    )
    _check_forks(tree, where)


def _check_forks(tree: RolloutTree, where: str) -> None:
    """At each fork the previous row's token must be smaller than this row's first suffix token."""
    length, lcp = tree.length, tree.lcp
    fork = np.flatnonzero((lcp[1:] < length[1:]) & (lcp[1:] < length[:-1])) + 1
    offsets, values = tree.suffix.offsets, tree.suffix.values
    for i in fork.tolist():
        l = int(lcp[i])
        own = int(lcp[i - 1])
        if own <= l:  # the previous row's own suffix holds position l
            before = int(values[offsets[i - 1] + l - own])
        else:
            before = int(tree.tokens(i - 1, l, l + 1)[0])
        if before >= int(values[offsets[i]]):
            raise DataError(
                "rows are not in lexicographic order, or lcp is too small",
                where=f"{where}, row {i}, position {l}",
            )


def _check_loss_spans(tree: RolloutTree, where: str) -> None:
    spans = tree.loss_spans
    _first(where, "loss_spans must hold start, stop pairs", spans.lengths % 2 != 0)
    counts = spans.lengths // 2
    row = np.repeat(np.arange(tree.num_rows), counts)
    start, stop = spans.values[::2].astype(np.int64), spans.values[1::2].astype(np.int64)
    bad = (start < 1) | (stop <= start) | (stop > tree.length[row])
    if len(row):
        same = row[1:] == row[:-1]
        bad[1:] |= same & (start[1:] < stop[:-1])
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise DataError(
            f"loss span [{start[i]}, {stop[i]}) is empty, out of [1, length), or overlaps the one before",
            where=f"{where}, row {row[i]}",
        )


def _check_per_position(
    column: Ragged, trained: npt.NDArray[np.int64], name: str, scalar_allowed: bool, where: str
) -> None:
    lengths = column.lengths
    ok = lengths == trained
    if scalar_allowed:
        ok |= lengths == 1
    if column.valid is not None:
        ok |= ~column.valid
    if not ok.all():
        i = int(np.flatnonzero(~ok)[0])
        raise DataError(
            f"{name} has {lengths[i]} values for {trained[i]} trained positions", where=f"{where}, row {i}"
        )
    finite = np.isfinite(column.values)
    if not finite.all():
        row = int(np.searchsorted(column.offsets, np.flatnonzero(~finite)[0], side="right")) - 1
        raise DataError(f"{name} is not finite", where=f"{where}, row {row}")
