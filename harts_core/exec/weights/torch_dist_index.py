"""The index of a sharded checkpoint, ``.metadata`` of torch.distributed.checkpoint, read without trusting it.

The index is a pickle, and unpickling runs what the file says. Here it is taken apart by an unpickler that
knows no classes: every name that a real index uses becomes an inert record, every other name is refused.
Nothing of the file is ever imported or called, and torch is not needed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harts_core.errors import CorruptFileError, DataError
from harts_core.exec.weights.regions import Ints, Region, are_disjoint, whole_region
from harts_core.exec.weights.safetensors_header import ITEM_BYTES, TensorInfo

INDEX = ".metadata"
MAX_INDEX_BYTES = 1 << 30

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_RECORDS = tuple(f"torch.distributed.checkpoint.{module}" for module in ("metadata", "planner", "filesystem"))
"""Modules whose classes become inert records."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and where its bytes are.

    Attributes:
        region: the box.
        file: the file that holds it.
        offset, length: of its bytes in the file, as torch.save wrote them.
    """

    region: Region
    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensorInfo(TensorInfo):
    """A tensor that lies in parts. ``file`` is the index.

    Attributes:
        chunks: its parts; together they are the whole.
    """

    chunks: tuple[Chunk, ...]


def read_index(folder: Path) -> dict[str, ShardedTensorInfo]:
    """The tensors of a sharded checkpoint by name; no data is read.

    Raises:
        DataError: there is no index.
        CorruptFileError: it is damaged, or does not fit the files beside it.
    """
    file = folder / INDEX
    if not file.is_file():
        raise DataError("no such file", where=str(file))
    if file.stat().st_size > MAX_INDEX_BYTES:
        raise CorruptFileError("the index is too large", where=str(file))
    try:
        index = _Reader(file.read_bytes()).load()
        tensors, places = index.fields["state_dict_metadata"], index.fields["storage_data"]
        located = {(key.fields["fqn"], key.fields["offset"]): place for key, place in places.items()}
        sizes: dict[str, int] = {}
        return {name: _tensor(folder, name, entry, located, sizes) for name, entry in tensors.items()}
    except CorruptFileError:
        raise
    except Exception as error:  # of a damaged pickle anything can come
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = f"not the index of a sharded checkpoint ({reason})"
        raise CorruptFileError(what, where=str(file)) from error


class _Record:
    """Any object of the index: its attributes."""

    fields: Mapping[str, Any] = {}

    def __init__(self, *arguments: Any) -> None:
        """Arguments are forgotten; those of dtypes and shapes do not come here."""

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {"state": state}


class _Reader(pickle.Unpickler):
    """Builds records; calls nothing but ``_Record`` and ``tuple``."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name of the file."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in _RECORDS or (module, name) == ("torch.serialization", "_get_layout"):
            return _Record
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _tensor(
    folder: Path,
    name: str,
    entry: _Record,
    located: Mapping[tuple[str, Ints], _Record],
    sizes: dict[str, int],
) -> ShardedTensorInfo:
    """One tensor, after checking that its parts are a whole.

    Args:
        folder: of the checkpoint.
        name: of the tensor.
        entry: ``TensorStorageMetadata``.
        located: ``_StorageInfo`` by tensor and first element.
        sizes: bytes of the files that were looked at.
    """

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise CorruptFileError(what, where=f"{folder / INDEX}, tensor {name}")

    require("size" in entry.fields, "it is not a tensor")
    shape, dtype = _ints(entry.fields["size"]), entry.fields["properties"].fields["state"][0]
    require(dtype in ITEM_BYTES, f"unknown dtype {dtype!r}")
    whole, chunks = whole_region(shape), []
    for part in entry.fields["chunks"]:
        region = Region(_ints(part.fields["offsets"]), _ints(part.fields["sizes"]))
        require(not region.numel or region.overlap(whole) == region, "a part lies outside of the tensor")
        place = located[name, region.start].fields
        require(place.get("transform_descriptors") is None, "its bytes are transformed")
        file_name, offset, length = place["relative_path"], *_ints((place["offset"], place["length"]))
        require(type(file_name) is str and Path(file_name).name == file_name, "a part lies elsewhere")
        if file_name not in sizes:
            require((folder / file_name).is_file(), f"there is no {file_name}")
            sizes[file_name] = (folder / file_name).stat().st_size
        require(offset + length <= sizes[file_name], f"{file_name} is truncated")
        require(region.numel * ITEM_BYTES[dtype] <= length, f"{file_name} has too few bytes of a part")
        chunks.append(Chunk(region, folder / file_name, offset, length))
    require(len({chunk.region.start for chunk in chunks}) == len(chunks), "two parts begin at one place")
    require(are_disjoint(c.region for c in chunks), "two parts overlap")
    require(sum(c.region.numel for c in chunks) == whole.numel, "its parts are not the whole tensor")
    return ShardedTensorInfo(
        file=folder / INDEX,
        dtype=dtype,
        shape=shape,
        num_bytes=whole.numel * ITEM_BYTES[dtype],
        chunks=tuple(chunks),
    )


def _ints(values: Any) -> Ints:
    if not isinstance(values, tuple) or not all(type(x) is int and x >= 0 for x in values):
        raise ValueError(f"{values!r} is not a tuple of sizes")
    return values
