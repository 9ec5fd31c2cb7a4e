"""Files written tensor by tensor are those of the safetensors library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harts_core.exec.weights.regions import Region
from harts_core.exec.weights.safetensors_file import (
    SafetensorsFile,
    SafetensorsReader,
    dtype_name,
    torch_dtypes,
    write_safetensors,
)
from harts_core.exec.weights.safetensors_header import ITEM_BYTES, read_header


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {
        f"{name}.{width}": (50 * torch.randn(3, width, generator=generator)).to(dtype)
        for width in (2, 1)
        for name, dtype in torch_dtypes().items()
    }
    return found | {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3), 'q"é': torch.ones(2)}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_the_library(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    write_safetensors(mine, tensors(), metadata)
    save_file(tensors(), theirs, metadata)
    assert mine.read_bytes() == theirs.read_bytes()


def test_the_order_of_writing_does_not_matter(tmp_path: Path) -> None:
    whole = tensors()
    forms = {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in whole.items()}
    with SafetensorsFile(tmp_path / "a", forms) as out:
        for name in reversed(whole):
            out.write(name, whole[name])
    save_file(whole, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_views_are_written_without_their_storage(tmp_path: Path) -> None:
    stack = torch.arange(24.0).view(4, 2, 3)
    write_safetensors(tmp_path / "a", {"row": stack[1], "column": stack[:, 0, 1], "turned": stack[2].t()})
    found = load_file(tmp_path / "a")
    assert torch.equal(found["row"], stack[1])
    assert torch.equal(found["column"], stack[:, 0, 1])
    assert torch.equal(found["turned"], stack[2].t())


def test_parts_are_read(tmp_path: Path) -> None:
    matrix = torch.arange(30.0).view(5, 6)
    write_safetensors(tmp_path / "a", {"m": matrix})
    reader = SafetensorsReader(read_header(tmp_path / "a"))
    assert torch.equal(reader.read("m"), matrix)
    assert torch.equal(reader.read("m", Region((1, 2), (3, 2))), matrix[1:4, 2:4])
    assert torch.equal(reader.read("m", Region((0, 0), (5, 6))), matrix)


def test_every_dtype_has_a_size() -> None:
    assert torch_dtypes().keys() == ITEM_BYTES.keys()
    assert {name: dtype.itemsize for name, dtype in torch_dtypes().items()} == ITEM_BYTES


def test_a_tensor_that_was_not_written_is_noticed(tmp_path: Path) -> None:
    forms = {"a": ("F32", (2,)), "b": ("F32", (3,))}
    with pytest.raises(AssertionError, match="'b'"), SafetensorsFile(tmp_path / "a", forms) as out:
        out.write("a", torch.zeros(2))
    with pytest.raises(OSError, match="full"), SafetensorsFile(tmp_path / "a", forms):
        raise OSError("full")
