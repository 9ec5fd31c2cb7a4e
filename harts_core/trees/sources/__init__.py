"""Rollout files: paths, directories, globs; the records of JSON, Parquet, Arrow and torch files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harts_core.errors import DataError
from harts_core.trees.sources.arrow_records import ColumnChoice, read_arrow_stream, read_parquet
from harts_core.trees.sources.item import Item
from harts_core.trees.sources.json_records import read_json
from harts_core.trees.sources.torch_records import read_torch

PICKLE_HINT = "pickle files can run code; dump rows with a hook from docs/hooks (verl.py, skyrl.py, …)"


def read_records(path: Path, *, max_record_bytes: int, columns: ColumnChoice = list) -> Iterator[Item]:
    """The records of one file, streamed; the container is told by the file's first bytes.

    Args:
        path: JSON (lines, or one document; plain, gzip or zstd), Parquet, Arrow, torch (zip).
        max_record_bytes: longest JSON line or document.
        columns: of a columnar file's column names, those that are needed.

    Raises:
        MissingBackendError: a torch file, and torch is not installed.

    Yields:
        Items in file order; an unreadable record or file is an item that holds its error.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError as error:
        yield Item(number=0, unit="file", content=DataError(f"cannot be opened ({error.strerror})"))
        return
    if not head:
        yield Item(number=0, unit="file", content=DataError("the file is empty"))
    elif head[:4] == b"PAR1":
        yield from read_parquet(path, columns)
    elif head[:6] == b"ARROW1" or head[:4] == b"\xff\xff\xff\xff":
        yield from read_arrow_stream(path)
    elif (head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")) or path.suffix in (
        ".pkl",
        ".pickle",
    ):
        refusal = DataError("a pickle file, which HARTS does not read", hint=PICKLE_HINT)
        yield Item(number=0, unit="file", content=refusal)
    elif head[:4] == b"PK\x03\x04":
        yield from read_torch(path)
    else:
        yield from read_json(path, max_record_bytes)


__all__ = ["Item", "read_records"]
