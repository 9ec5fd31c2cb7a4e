"""Writing synthetic rows to Parquet, streamed in row groups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harts_core.files import atomic_file
from harts_core.progress import Progress, no_progress
from harts_core.trees.build import Trajectory
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import WorkloadSpec
from harts_core.trees.tree_file import LOSS_SPAN

ROW_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), False),
        pa.field("group_id", pa.string(), False),
        pa.field("step", pa.int32()),
        pa.field("tokens", pa.large_list(pa.field("item", pa.int32(), False)), False),
        pa.field("loss_spans", pa.list_(pa.field("item", LOSS_SPAN, False)), False),
        pa.field("old_logprobs", pa.large_list(pa.field("item", pa.float32(), False)), False),
        pa.field("reward", pa.float32(), False),
        pa.field("advantage", pa.float32(), False),
        pa.field("policy_version", pa.int32(), False),
    ]
)
"""Columns of a Parquet file of HARTS rows as ``harts synth`` writes it."""

_GROUP_TOKENS = 4_000_000
"""Tokens of a row group: what is in memory at a time, about 40 MB with the log-probs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthSummary:
    """What was written.

    Attributes:
        kind, seed, step, vocab_size, length_scale: the workload's options.
        rows: rows written.
        tasks: distinct group_ids.
        tokens: token occurrences of all rows.
        trained_positions: positions inside loss spans.
        mean_length: tokens / rows.
        max_length: tokens of the longest row.
    """

    kind: str
    seed: int
    step: int
    vocab_size: int
    length_scale: int
    rows: int
    tasks: int
    tokens: int
    trained_positions: int
    mean_length: float
    max_length: int


def write_rows(path: Path, spec: WorkloadSpec, progress: Progress = no_progress) -> SynthSummary:
    """Write the rows of a workload to a Parquet file, atomically, one row group at a time.

    The workload is stored as JSON in the file's schema metadata under ``harts``. The same spec gives the
    same bytes (with the same version of pyarrow).

    Args:
        path: the file to write.
        spec: the workload.
        progress: called after every row group with the rows written.

    Raises:
        DataError: the output's folder does not exist, or ``path`` is a folder.
    """
    import pyarrow.parquet as pq

    metadata = {"format": "harts-rows", "vocab_size": spec.vocab_size, "workload": asdict(spec)}
    schema = ROW_SCHEMA.with_metadata({"harts": json.dumps(metadata, sort_keys=True)})
    rows = tokens = trained = longest = 0
    tasks: set[str] = set()
    with (
        atomic_file(Path(path)) as temporary,
        pq.ParquetWriter(
            temporary,
            schema,
            compression="zstd",
            use_dictionary=["group_id"],
            data_page_size=4 * _GROUP_TOKENS,  # whole columns: rows of one rollout compress together
        ) as writer,
    ):
        for group in _row_groups(generate(spec)):
            writer.write_batch(rows_to_batch(group))
            lengths = [len(r.tokens) for r in group]
            rows += len(group)
            tokens += sum(lengths)
            longest = max(longest, *lengths)
            trained += sum(int(np.diff(r.loss_spans).sum()) for r in group)
            tasks.update(r.group_id for r in group)
            progress("rows", rows, spec.rows)
    return SynthSummary(
        kind=spec.kind,
        seed=spec.seed,
        step=spec.step,
        vocab_size=spec.vocab_size,
        length_scale=spec.length_scale,
        rows=rows,
        tasks=len(tasks),
        tokens=tokens,
        trained_positions=trained,
        mean_length=tokens / rows,
        max_length=longest,
    )


def rows_to_batch(rows: list[Trajectory]) -> pa.RecordBatch:
    """Rows with old log-probs and one advantage each as one Arrow batch of ``ROW_SCHEMA``."""
    spans = np.concatenate([r.loss_spans for r in rows])
    span_items = pa.StructArray.from_arrays(
        [pa.array(np.ascontiguousarray(spans[:, i])) for i in (0, 1)], fields=list(LOSS_SPAN)
    )
    columns: dict[str, Any] = {
        name: pa.array([getattr(r, name) for r in rows], ROW_SCHEMA.field(name).type)
        for name in ("trajectory_id", "group_id", "step", "reward", "policy_version")
    }
    columns["advantage"] = pa.array(np.concatenate([r.advantages for r in rows]))
    columns["tokens"] = _lists("tokens", [r.tokens for r in rows])
    columns["old_logprobs"] = _lists("old_logprobs", [r.old_logprobs for r in rows])
    columns["loss_spans"] = pa.ListArray.from_arrays(
        pa.array(np.cumsum([0, *(len(r.loss_spans) for r in rows)], dtype=np.int32)),
        span_items,
        type=ROW_SCHEMA.field("loss_spans").type,
    )
    return pa.record_batch([columns[f.name] for f in ROW_SCHEMA], schema=ROW_SCHEMA)


def _lists(name: str, values: list[Any]) -> pa.Array:
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), pa.array(np.concatenate(values)), type=ROW_SCHEMA.field(name).type
    )


def _row_groups(rows: Iterator[Trajectory]) -> Iterator[list[Trajectory]]:
    group: list[Trajectory] = []
    tokens = 0
    for row in rows:
        group.append(row)
        tokens += len(row.tokens)
        if tokens >= _GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group
