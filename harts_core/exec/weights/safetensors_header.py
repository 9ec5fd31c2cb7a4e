"""The header of a safetensors file, checked before a tensor is read or memory is allocated for it.

Format: 8 bytes little-endian header length, the header (JSON: tensor name to dtype, shape and half-open
``data_offsets``), then the data without holes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harts_core.errors import CorruptFileError, DataError
from harts_core.headers import parse_json

MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        file: the file that holds it.
        dtype: safetensors' name (``F32``, ``BF16``, …).
        shape: dimensions.
        num_bytes: of its data.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file; no data is read.

    Raises:
        DataError: no such file.
        CorruptFileError: not a safetensors file, truncated, or inconsistent in itself.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError("no such file", where=str(path))
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CorruptFileError("not a safetensors file, or truncated in its header", where=str(path))
        raw = f.read(length)
    header = parse_json(raw, name="the safetensors header", where=path)
    if not isinstance(header, dict):
        raise CorruptFileError("the safetensors header is not an object", where=str(path))
    header.pop("__metadata__", None)
    infos, pieces = {}, []
    for name, entry in header.items():
        start, stop = _check_entry(path, name, entry)
        pieces.append((start, stop))
        infos[name] = TensorInfo(
            file=path, dtype=entry["dtype"], shape=tuple(entry["shape"]), num_bytes=stop - start
        )
    position = 0
    for start, stop in sorted(pieces):
        if start != position:
            raise CorruptFileError("the tensors overlap or leave a hole", where=str(path))
        position = stop
    if position != size - 8 - length:
        raise CorruptFileError(
            f"{position} bytes of tensors are announced, {size - 8 - length} are there", where=str(path)
        )
    return infos


def _check_entry(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """data_offsets of one header entry, after checking it."""
    where = f"{path}, tensor {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CorruptFileError("the header entry lacks dtype, shape or data_offsets", where=where)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if entry["dtype"] not in ITEM_BYTES:
        raise CorruptFileError(f"unknown dtype {entry['dtype']!r}", where=where)
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(x) is int and x >= 0 for x in numbers):
            raise CorruptFileError(
                "shape and data_offsets must be lists of non-negative integers", where=where
            )
    expected = math.prod(shape) * ITEM_BYTES[entry["dtype"]]
    if len(offsets) != 2 or offsets[1] - offsets[0] != expected:
        raise CorruptFileError(f"shape {shape} needs {expected} bytes, data_offsets {offsets}", where=where)
    return offsets[0], offsets[1]
