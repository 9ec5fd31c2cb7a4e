"""A rollout tree as HARTS rows (Parquet): every trajectory in full, streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harts_core.errors import ConfigError
from harts_core.files import atomic_file
from harts_core.progress import Progress, no_progress
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import TREE_SCHEMA

BATCH_TOKENS = 4 * 2**20
"""Tokens written at a time (16 MiB), or one row where that is longer."""

ROWS_SCHEMA = pa.schema(
    [
        TREE_SCHEMA.field("trajectory_id"),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("tokens", TREE_SCHEMA.field("suffix").type, nullable=False),
        *(TREE_SCHEMA.field(name) for name in ("loss_spans", "old_logprobs", "ref_logprobs", "advantages")),
        *(TREE_SCHEMA.field(name) for name in ("reward", "step", "policy_version")),
    ]
)
"""HARTS rows as exported; log-probs hold one value per trained position."""


def export_rows(path: Path, tree: RolloutTree, progress: Progress = no_progress) -> None:
    """Write a tree as HARTS rows, atomically. Ingesting them gives the same content again, provided that
    every row has a trained position (ingest leaves others out).

    Args:
        path: a ``.parquet`` file.
        tree: the tree.
        progress: told the rows written.

    Raises:
        ConfigError: another suffix.
        DataError: the folder does not exist.
    """
    import pyarrow.parquet as pq

    path = Path(path)
    if path.suffix != ".parquet":
        raise ConfigError("rows are exported as Parquet", where=str(path), hint="name a .parquet file")
    said = {n: tree.metadata.get(n) for n in ("vocab_size", "tokenizer", "sampling")}
    metadata = {"format": "rows", "version": 1, **said}
    schema = ROWS_SCHEMA.with_metadata({"harts": json.dumps(metadata, sort_keys=True)})
    with atomic_file(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for batch, stop in _batches(tree, schema):
            writer.write_batch(batch)
            progress("writing rows", stop, tree.num_rows)


def _batches(tree: RolloutTree, schema: pa.Schema) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Record batches of about BATCH_TOKENS tokens, and the row after each."""
    current = np.empty(int(tree.length.max()), np.int32)  # the tokens of the row at hand
    pending: list[Any] = []
    num_tokens = first = 0
    for row in range(tree.num_rows):
        length, lcp = int(tree.length[row]), int(tree.lcp[row])
        current[lcp:length] = tree.suffix[row]  # tokens before lcp are the row before's
        pending.append(current[:length].copy())
        num_tokens += length
        if num_tokens >= BATCH_TOKENS or row == tree.num_rows - 1:
            yield _batch(tree, schema, first, pending), row + 1
            pending, num_tokens, first = [], 0, row + 1


def _batch(tree: RolloutTree, schema: pa.Schema, first: int, tokens: list[Any]) -> pa.RecordBatch:
    rows = range(first, first + len(tokens))

    def ragged(column: Ragged | None) -> list[Any]:
        if column is None:
            return [None] * len(rows)
        return [None if column.is_null(r) else column[r] for r in rows]

    def scalars(values: Any, valid: Any) -> list[Any]:
        if values is None:
            return [None] * len(rows)
        return [values[r].item() if valid is None or valid[r] else None for r in rows]

    spans = [tree.loss_spans[r].reshape(-1, 2).tolist() for r in rows]
    columns: dict[str, list[Any]] = {
        "trajectory_id": [tree.trajectory_id[r] for r in rows],
        "group_id": [tree.group_id[r] for r in rows],
        "tokens": tokens,
        "loss_spans": [[{"start": a, "stop": b} for a, b in pairs] for pairs in spans],
        "old_logprobs": ragged(tree.old_logprobs),
        "ref_logprobs": ragged(tree.ref_logprobs),
        "advantages": ragged(tree.advantages),
        "reward": scalars(tree.reward, None if tree.reward is None else ~np.isnan(tree.reward)),
        "step": scalars(tree.step, tree.step_valid),
        "policy_version": scalars(tree.policy_version, tree.policy_version_valid),
    }
    return pa.record_batch([pa.array(columns[f.name], f.type) for f in schema], schema=schema)
