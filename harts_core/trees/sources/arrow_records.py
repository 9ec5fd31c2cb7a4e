"""Rows of Parquet and Arrow files as lazy mappings: a column is converted only where it is looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            error = _refuse_tree(schema)
            if error is not None:
                yield Item(number=0, unit="file", content=error)
                return
            names = list(columns(schema.names))
            constants = _constants(schema)
            for batch in file.iter_batches(BATCH_ROWS, columns=names):
                batch.validate(full=True)
                yield from _rows(batch, row, constants)
                row += batch.num_rows
            if row == 0:
                yield Item(number=0, unit="file", content=DataError("the file has no rows"))
    except _FAILURES as error:
        yield _unreadable(row, "Parquet", error)


def read_arrow_stream(path: Path) -> Iterator[Item]:
    """Stream the rows of an Arrow IPC file or stream."""
    row = 0
    try:
        with pa.memory_map(str(path)) as source:
            with open(path, "rb") as file:
                is_file = file.read(6) == b"ARROW1"
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            error = _refuse_tree(reader.schema)
            if error is not None:
                yield Item(number=0, unit="file", content=error)
                return
            constants = _constants(reader.schema)
            for batch in _batches(reader) if is_file else reader:
                batch.validate(full=True)
                yield from _rows(batch, row, constants)
                row += batch.num_rows
            if row == 0:
                yield Item(number=0, unit="file", content=DataError("the file has no rows"))
    except _FAILURES as error:
        yield _unreadable(row, "Arrow", error)


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)


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
