"""The index of a sharded checkpoint: nothing in it is run, and what does not fit together is refused."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from harts_core.errors import CorruptFileError, DataError
from harts_core.exec.weights.regions import Region
from harts_core.exec.weights.sharded_checkpoint import ShardedReader
from harts_core.exec.weights.torch_dist_index import INDEX, read_index

MATRIX = torch.arange(24.0).view(4, 6)
CUTS = ((0, 0, 1, 6), (1, 0, 1, 4), (1, 4, 1, 2), (2, 0, 2, 6))


def write(folder: Path, change: Callable[[Metadata], None] = lambda metadata: None) -> Path:
    """A checkpoint of ``MATRIX`` in uneven parts over two files, as torch writes it."""
    chunks, places = [], {}
    for file in ("__0_0.distcp", "__1_0.distcp"):
        (folder / file).write_bytes(b"")
    for i, (row, column, rows, columns) in enumerate(CUTS):
        name = f"__{i % 2}_0.distcp"
        with open(folder / name, "ab") as f:
            start = f.tell()
            torch.save(MATRIX[row : row + rows, column : column + columns].clone(), f)
            length = f.tell() - start
        offsets, sizes = torch.Size((row, column)), torch.Size((rows, columns))
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        places[MetadataIndex("m", offsets)] = _StorageInfo(name, start, length)
    properties = TensorProperties(dtype=torch.float32)
    metadata = Metadata({"m": TensorStorageMetadata(properties, MATRIX.shape, chunks)})
    metadata.storage_data, metadata.storage_meta = places, StorageMeta(checkpoint_id="/somewhere")
    change(metadata)
    (folder / INDEX).write_bytes(pickle.dumps(metadata))
    return folder


def test_any_part_is_read(tmp_path: Path) -> None:
    index = read_index(write(tmp_path))
    assert index["m"].shape == (4, 6)
    assert (index["m"].dtype, index["m"].num_bytes, len(index["m"].chunks)) == ("F32", 96, 4)
    reader = ShardedReader(index)
    assert torch.equal(reader.read("m"), MATRIX)
    for row in range(4):
        for column in range(6):
            part = Region((row, column), (4 - row, 6 - column))
            assert torch.equal(reader.read("m", part), MATRIX[row:, column:])
    assert torch.equal(reader.read("m", Region((1, 4), (1, 2))), MATRIX[1:2, 4:])


class _Attack:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_nothing_of_the_index_is_run(tmp_path: Path) -> None:
    def attack(metadata: Metadata) -> None:
        metadata.planner_data = _Attack(tmp_path / "run")

    write(tmp_path, attack)
    with pytest.raises(CorruptFileError, match=r"it names posix\.mkdir"):
        read_index(tmp_path)
    assert not (tmp_path / "run").exists()
    pickle.loads((tmp_path / INDEX).read_bytes())
    assert (tmp_path / "run").exists()  # which plain unpickling would have run


def _set(name: str, value: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            setattr(place, name, value)

    return change


def _chunk(i: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        metadata.state_dict_metadata["m"].chunks[i] = chunk  # type: ignore[union-attr]
        metadata.storage_data[MetadataIndex("m", offsets)] = next(iter(metadata.storage_data.values()))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("relative_path", "../m"), "a part lies elsewhere"),
        (_set("relative_path", "gone"), "there is no gone"),
        (_set("length", 1 << 40), "is truncated"),
        (_set("length", 8), "too few bytes"),
        (_set("offset", -1), "not a tuple of sizes"),
        (_set("transform_descriptors", ["zstd"]), "its bytes are transformed"),
        (_chunk(0, (0, 0), (1, 5)), "not the whole tensor"),
        (_chunk(0, (3, 0), (2, 6)), "outside of the tensor"),
        (_chunk(0, (1, 0), (1, 6)), "begin at one place"),
        (lambda m: m.state_dict_metadata["m"].chunks.pop(), "not the whole tensor"),
        (lambda m: m.storage_data.clear(), "not the index of a sharded checkpoint"),
        (lambda m: m.state_dict_metadata.update(m=BytesStorageMetadata()), "not a tensor"),
        (lambda m: setattr(m, "state_dict_metadata", 3), "not the index of a sharded checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Metadata], None], message: str
) -> None:
    write(tmp_path, change)
    with pytest.raises(CorruptFileError, match=message) as error:
        read_index(tmp_path)
    assert error.value.where is not None
    assert error.value.where.startswith(str(tmp_path / INDEX))


@pytest.mark.parametrize("content", [b"", b"\x80", b"no pickle", pickle.dumps(3), pickle.dumps({"a": 1})])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CorruptFileError, match="not the index of a sharded checkpoint"):
        read_index(tmp_path)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_index(tmp_path)


def test_damaged_parts_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CorruptFileError, match="the part at byte 0 cannot be read") as error:
        ShardedReader(read_index(tmp_path)).read("m")
    assert error.value.where == str(file)


def test_overlapping_parts_are_refused_when_they_leave_a_hole(tmp_path: Path) -> None:
    """As many elements as the tensor has, of which two are nowhere."""
    write(tmp_path, _chunk(2, (2, 2), (1, 2)))
    with pytest.raises(CorruptFileError, match="two parts overlap"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "odd", [torch.empty(1, 6, device="meta"), torch.zeros(1, 6).to_sparse(), {"m": 1}], ids=type
)
def test_a_part_that_is_no_plain_tensor_is_refused(tmp_path: Path, odd: Any) -> None:
    def replace(metadata: Metadata) -> None:
        (tmp_path / "odd").write_bytes(b"")
        torch.save(odd, tmp_path / "odd")
        place = next(iter(metadata.storage_data.values()))
        place.relative_path, place.length = "odd", (tmp_path / "odd").stat().st_size

    write(tmp_path, replace)
    with pytest.raises(CorruptFileError, match="the part at byte 0 cannot be read"):
        ShardedReader(read_index(tmp_path)).read("m")


def test_a_part_of_another_dtype_or_shape_is_refused(tmp_path: Path) -> None:
    def double(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["m"]
        entry.properties.dtype = torch.int32  # type: ignore[union-attr]

    write(tmp_path, double)
    with pytest.raises(CorruptFileError, match=r"it is .*F32"):
        ShardedReader(read_index(tmp_path)).read("m")
