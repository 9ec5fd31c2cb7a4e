"""Rows of Parquet and Arrow files as lazy mappings: a column is converted only where it is looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from harts_core.errors import CorruptFileError, DataError
from harts_core.trees.sources.item import Item

ColumnChoice = Callable[[Sequence[str]], Sequence[str]]
"""Of a file's column names, those that are needed."""

BATCH_ROWS = 64
"""Rows decoded at a time: a few MiB at 30,000 tokens a row."""

_FAILURES = (pa.ArrowException, OSError, UnicodeDecodeError)


class ArrowRow(Mapping[str, Any]):
    """One row of a record batch. Flat numeric lists come as numpy arrays, everything else as Python values.

    ``constants`` are what the file's own ``harts`` metadata says of every row (tokenizer, vocab_size, …).
    """

    __slots__ = ("_columns", "_constants", "_index")

    def __init__(self, columns: Mapping[str, pa.Array], index: int, constants: Mapping[str, Any]) -> None:
        self._columns = columns
        self._index = index
        self._constants = constants

    def __getitem__(self, name: str) -> Any:
        column = self._columns.get(name)
        if column is None:
            return self._constants[name]
        try:
            return _value(column[self._index])
        except UnicodeDecodeError as error:  # names inside a struct, which validation does not look at
            raise DataError(f"{name} is not UTF-8 text") from error

    def __iter__(self) -> Iterator[str]:
        yield from self._columns
        yield from (n for n in self._constants if n not in self._columns)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._columns or name in self._constants


def _value(scalar: pa.Scalar) -> Any:
    kind = scalar.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return scalar.as_py()
    values = scalar.values
    if values is None:
        return None
    flat = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if (flat or pa.types.is_boolean(values.type)) and not values.null_count:
        return values.to_numpy(zero_copy_only=False)
    return values.to_pylist()


def read_parquet(path: Path, columns: ColumnChoice) -> Iterator[Item]:
    """Stream the rows of a Parquet file, only the needed columns."""
    return _stream(_parquet_batches(path, columns), "Parquet")


def read_arrow_stream(path: Path) -> Iterator[Item]:
    """Stream the rows of an Arrow IPC file or stream."""
    return _stream(_arrow_batches(path), "Arrow")


Opened = AbstractContextManager[tuple[pa.Schema, Iterator[pa.RecordBatch]]]
"""A file that is read as long as the context lasts; no batch is read before it is asked for."""


@contextmanager
def _parquet_batches(
    path: Path, columns: ColumnChoice
) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    import pyarrow.parquet as pq

    def batches() -> Iterator[pa.RecordBatch]:
        yield from file.iter_batches(BATCH_ROWS, columns=list(columns(file.schema_arrow.names)))

    with pq.ParquetFile(path) as file:
        yield file.schema_arrow, batches()


@contextmanager
def _arrow_batches(path: Path) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    with open(path, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
    with pa.memory_map(str(path)) as source:
        if is_file:
            reader = pa.ipc.open_file(source)
            yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
        else:
            stream = pa.ipc.open_stream(source)
            yield stream.schema, iter(stream)


def _stream(opened: Opened, kind: str) -> Iterator[Item]:
    """The rows of a file, or what is wrong with it."""
    row = 0
    try:
        with opened as (schema, batches):
            error = _refuse_tree(schema)
            if error is not None:
                yield Item(number=0, unit="file", content=error)
                return
            constants = _constants(schema)
            for batch in batches:
                batch.validate(full=True)
                yield from _rows(batch, row, constants)
                row += batch.num_rows
            if row == 0:
                yield Item(number=0, unit="file", content=DataError("the file has no rows"))
    except _FAILURES as error:
        yield _unreadable(row, kind, error)


def _rows(batch: pa.RecordBatch, first: int, constants: Mapping[str, Any]) -> Iterator[Item]:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for i in range(batch.num_rows):
        yield Item(number=first + i, unit="row", content=ArrowRow(columns, i, constants))


def _unreadable(row: int, kind: str, error: Exception) -> Item:
    what = f"not a readable {kind} file beyond row {row} ({str(error).splitlines()[0]})"
    return Item(number=row, unit="row", content=CorruptFileError(what, hint="the file is damaged"))


def _metadata(schema: pa.Schema) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(b"harts")
    try:
        value = json.loads(raw) if raw else {}
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def _constants(schema: pa.Schema) -> dict[str, Any]:
    metadata = _metadata(schema)
    names = ("tokenizer", "vocab_size", "sampling")
    return {n: metadata[n] for n in names if metadata.get(n) is not None}


def _refuse_tree(schema: pa.Schema) -> DataError | None:
    if _metadata(schema).get("format") != "rollout-tree":
        return None
    return DataError(
        "a rollout-tree file already", hint="turn it into rows first: harts export FILE -o rows.parquet"
    )
