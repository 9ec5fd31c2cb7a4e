"""The rollout-tree file: one Arrow IPC file, zstd buffers, one row per trajectory, front-coded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from harts_core.errors import CorruptFileError, SchemaMismatchError
from harts_core.files import arrow_failures, atomic_file, read_arrow, write_arrow
from harts_core.headers import parse_header
from harts_core.trees.ragged import Ragged
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_check import check_tree

FORMAT = "rollout-tree"
VERSION = 1
LOSS_SPAN = pa.struct([pa.field("start", pa.int32(), False), pa.field("stop", pa.int32(), False)])
TREE_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("group_id", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("lcp", pa.int32(), nullable=False),
        pa.field("suffix", pa.large_list(pa.field("item", pa.int32(), False)), nullable=False),
        pa.field("loss_spans", pa.list_(pa.field("item", LOSS_SPAN, False)), nullable=False),
        pa.field("old_logprobs", pa.large_list(pa.field("item", pa.float32(), False))),
        pa.field("ref_logprobs", pa.large_list(pa.field("item", pa.float32(), False))),
        pa.field("advantages", pa.large_list(pa.field("item", pa.float32(), False))),
        pa.field("reward", pa.float32()),
        pa.field("step", pa.int32()),
        pa.field("policy_version", pa.int32()),
    ]
)
REQUIRED = ("length", "lcp", "suffix")
"""Columns without which a file is refused; a missing optional column reads as absent."""


def content_sha256(tree: RolloutTree) -> str:
    """SHA-256 over the canonical column values, independent of compression, batches and metadata.

    Every column enters in schema order as its name, its null mask and its little-endian values; an absent
    column equals an all-null one.
    """
    digest = hashlib.sha256()

    def add(name: str, *arrays: npt.NDArray[Any] | None) -> None:
        digest.update(f"{name}\0".encode())
        for array in arrays:
            if array is not None:
                little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
                digest.update(len(little).to_bytes(8, "little"))
                digest.update(little.data)

    def add_strings(name: str, values: tuple[str, ...]) -> None:
        encoded = [v.encode() for v in values]
        add(name, np.array([len(v) for v in encoded], np.int64))
        digest.update(b"".join(encoded))

    def add_ragged(name: str, column: Ragged | None) -> None:
        if column is None or (column.valid is not None and not column.valid.any()):
            add(name)
            return
        valid = np.ones(len(column), np.bool_) if column.valid is None else column.valid
        add(name, valid, column.lengths, column.values)

    add_strings("trajectory_id", tree.trajectory_id)
    add_strings("group_id", tree.group_id)
    add("length", tree.length)
    add("lcp", tree.lcp)
    add_ragged("suffix", tree.suffix)
    add_ragged("loss_spans", tree.loss_spans)
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        add_ragged(name, getattr(tree, name))
    reward = tree.reward
    valid = None if reward is None else ~np.isnan(reward)
    add(
        "reward",
        *((valid, reward[valid]) if reward is not None and valid is not None and valid.any() else ()),
    )
    for name in ("step", "policy_version"):
        value, valid = getattr(tree, name), getattr(tree, f"{name}_valid")
        if value is None:
            add(name)
            continue
        valid = np.ones(len(value), np.bool_) if valid is None else valid
        add(name, *((valid, value[valid]) if valid.any() else ()))
    return digest.hexdigest()


def finish_tree(tree: RolloutTree, where: str) -> RolloutTree:
    """Check a tree and complete its metadata (format, version, content hash).

    Raises:
        DataError: an invariant is broken; ``where`` is named.
    """
    check_tree(tree, where)
    metadata = {"format": FORMAT, "version": VERSION, **tree.metadata}
    metadata["content_sha256"] = content_sha256(tree)
    return replace(tree, metadata=metadata)


def tree_to_table(tree: RolloutTree) -> pa.Table:
    """The Arrow table of a tree, all columns present, metadata attached."""
    columns = {
        "trajectory_id": pa.array(tree.trajectory_id, pa.string()),
        "group_id": pa.array(tree.group_id, pa.string()).dictionary_encode(),
        "length": pa.array(tree.length),
        "lcp": pa.array(tree.lcp),
        "suffix": _large_list(tree.suffix, pa.int32()),
        "loss_spans": _spans_to_arrow(tree.loss_spans),
        "old_logprobs": _large_list(tree.old_logprobs, pa.float32(), tree.num_rows),
        "ref_logprobs": _large_list(tree.ref_logprobs, pa.float32(), tree.num_rows),
        "advantages": _large_list(tree.advantages, pa.float32(), tree.num_rows),
        "reward": _nullable(
            tree.reward, None if tree.reward is None else ~np.isnan(tree.reward), pa.float32(), tree
        ),
        "step": _nullable(tree.step, tree.step_valid, pa.int32(), tree),
        "policy_version": _nullable(tree.policy_version, tree.policy_version_valid, pa.int32(), tree),
    }
    schema = TREE_SCHEMA.with_metadata({"harts": json.dumps(tree.metadata, sort_keys=True)})
    return pa.table([columns[f.name] for f in TREE_SCHEMA], schema=schema)


def write_tree(path: Path, tree: RolloutTree) -> RolloutTree:
    """Write a tree atomically; the checked tree with complete metadata is returned."""
    tree = finish_tree(tree, str(path))
    with atomic_file(Path(path)) as temporary:
        write_arrow(temporary, tree_to_table(tree), compression="zstd")
    return tree


def read_tree(path: Path) -> RolloutTree:
    """Read and check a rollout-tree file.

    Raises:
        DataError: no such file, or an invariant is broken.
        SchemaMismatchError: a column is missing or has another type.
        CorruptFileError: unreadable, or its content does not match the hash in its metadata.
    """
    path = Path(path)
    table = read_arrow(path)
    metadata = _read_metadata(table.schema, path)
    for name in REQUIRED:
        if name not in table.schema.names:
            raise SchemaMismatchError(
                f"column {name} is missing", where=str(path), hint="make rollout-tree files with harts ingest"
            )
    with arrow_failures(path):
        tree = _tree_from_table(table.combine_chunks(), metadata, path)
    tree = finish_tree(tree, str(path))
    stored = metadata.get("content_sha256")
    if stored is not None and stored != tree.metadata["content_sha256"]:
        raise CorruptFileError(
            f"the content does not match its hash ({stored[:12]}… stored)",
            where=str(path),
            hint="the file was damaged or edited; ingest the sources again",
        )
    return tree


def _read_metadata(schema: pa.Schema, path: Path) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(b"harts")
    if raw is None:
        return {}
    metadata = parse_header(raw, format=FORMAT, version=VERSION, name="the schema metadata", where=path)
    vocab = metadata.get("vocab_size")
    if vocab is not None and (not isinstance(vocab, int) or isinstance(vocab, bool)):
        raise SchemaMismatchError("vocab_size in the schema metadata must be an integer", where=str(path))
    return metadata


def _tree_from_table(table: pa.Table, metadata: dict[str, Any], path: Path) -> RolloutTree:
    n = table.num_rows

    def column(name: str, kind: pa.DataType) -> pa.Array | None:
        if name not in table.schema.names:
            return None
        array = table.column(name).combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        if array.type != kind:
            try:
                array = array.cast(kind)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise SchemaMismatchError(
                    f"column {name} has type {array.type}, not {kind}", where=str(path)
                ) from error
        if name in (*REQUIRED, "trajectory_id", "group_id", "loss_spans") and array.null_count:
            raise SchemaMismatchError(f"column {name} has nulls", where=str(path))
        return array

    def strings(name: str) -> tuple[str, ...] | None:
        array = column(name, pa.string())
        return None if array is None else tuple(array.to_pylist())

    def integers(name: str) -> tuple[Any, Any]:
        array = column(name, pa.int32())
        if array is None or array.null_count == len(array):
            return None, None
        valid = None if not array.null_count else array.is_valid().to_numpy(zero_copy_only=False)
        return array.fill_null(0).to_numpy(), valid

    numbers = tuple(str(i) for i in range(n))
    reward = column("reward", pa.float32())
    floats = {
        name: _ragged(column(name, pa.large_list(pa.float32())), np.float32, path, name)
        for name in ("old_logprobs", "ref_logprobs", "advantages")
    }
    suffix = _ragged(column("suffix", pa.large_list(pa.int32())), np.int32, path, "suffix")
    if suffix is None:  # all rows null cannot happen (checked above): only for zero rows
        suffix = Ragged.from_rows([], np.int32)
    step, step_valid = integers("step")
    version, version_valid = integers("policy_version")
    return RolloutTree(
        trajectory_id=strings("trajectory_id") or numbers,
        group_id=strings("group_id") or numbers,
        length=_required(column("length", pa.int32())).to_numpy(),
        lcp=_required(column("lcp", pa.int32())).to_numpy(),
        suffix=suffix,
        loss_spans=_spans_from_arrow(column("loss_spans", pa.list_(LOSS_SPAN)), n),
        reward=None if reward is None or reward.null_count == n else reward.to_numpy(zero_copy_only=False),
        step=step,
        step_valid=step_valid,
        policy_version=version,
        policy_version_valid=version_valid,
        metadata=metadata,
        **floats,
    )


def _required(array: pa.Array | None) -> pa.Array:
    assert array is not None  # presence of REQUIRED columns was checked
    return array


def _large_list(column: Ragged | None, kind: pa.DataType, num_rows: int = 0) -> pa.Array:
    item = pa.large_list(pa.field("item", kind, False))
    if column is None:
        return pa.nulls(num_rows, item)
    mask = None if column.valid is None else pa.array(~column.valid)
    return pa.LargeListArray.from_arrays(
        pa.array(column.offsets), pa.array(column.values, kind), type=item, mask=mask
    )


def _spans_to_arrow(spans: Ragged) -> pa.Array:
    pairs = pa.StructArray.from_arrays(
        [pa.array(spans.values[::2], pa.int32()), pa.array(spans.values[1::2], pa.int32())],
        fields=list(LOSS_SPAN),
    )
    offsets = pa.array((spans.offsets // 2).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pairs, type=TREE_SCHEMA.field("loss_spans").type)


def _spans_from_arrow(array: pa.Array | None, num_rows: int) -> Ragged:
    if array is None:
        return Ragged(offsets=np.zeros(num_rows + 1, np.int64), values=np.empty(0, np.int32))
    flat = array.flatten()
    values = np.empty(2 * len(flat), np.int32)
    values[::2] = flat.field("start").to_numpy(zero_copy_only=False)
    values[1::2] = flat.field("stop").to_numpy(zero_copy_only=False)
    offsets = array.offsets.to_numpy().astype(np.int64)
    return Ragged(offsets=(offsets - offsets[0]) * 2, values=values)


def _nullable(values: Any, valid: Any, kind: pa.DataType, tree: RolloutTree) -> pa.Array:
    if values is None:
        return pa.nulls(tree.num_rows, kind)
    return pa.array(values, kind, mask=None if valid is None else ~np.asarray(valid))


def _ragged(array: pa.Array | None, dtype: Any, path: Path, name: str) -> Ragged | None:
    if array is None or (len(array) and array.null_count == len(array)):
        return None
    valid = None if not array.null_count else array.is_valid().to_numpy(zero_copy_only=False)
    flat = array.flatten()  # skips null rows and honours slices
    if flat.null_count:
        raise SchemaMismatchError(f"column {name} has null values inside a list", where=str(path))
    lengths = array.value_lengths().fill_null(0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Ragged(
        offsets=offsets, values=flat.to_numpy(zero_copy_only=False).astype(dtype, copy=False), valid=valid
    )
