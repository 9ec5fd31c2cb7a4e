from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harts_core.errors import CorruptFileError, DataError
from harts_core.exec.weights.safetensors_header import read_header


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros(())}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    found = {name: (info.dtype, info.shape, info.num_bytes) for name, info in header.items()}
    assert found == {"a": ("F32", (2, 3), 24), "b": ("BF16", (4,), 8), "c": ("F32", (), 4)}


def entry(offsets: list[int], shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1] if shape is None else shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "header is not JSON"),
        ([1], b"", "not an object"),
        ({"a": {"dtype": "F32"}}, b"", "lacks dtype, shape or data_offsets"),
        ({"a": entry([0, 4], dtype="F99")}, bytes(4), "unknown dtype 'F99'"),
        ({"a": entry([0, 4], shape=[-1])}, bytes(4), "non-negative integers"),
        ({"a": entry([0, 4], shape=[10**12])}, bytes(4), r"needs 4000000000000 bytes"),
        ({"a": entry([0, 4]), "b": entry([0, 4])}, bytes(4), "overlap or leave a hole"),
        ({"a": entry([0, 4]), "b": entry([8, 12])}, bytes(12), "overlap or leave a hole"),
        ({"a": entry([0, 4])}, bytes(3), "4 bytes of tensors are announced, 3 are there"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    file = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CorruptFileError, match=message) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    for content in (b"", b"abc", (10**15).to_bytes(8, "little") + b"{}"):
        file.write_bytes(content)
        with pytest.raises(CorruptFileError, match="not a safetensors file"):
            read_header(file)
    with pytest.raises(DataError, match="no such file"):
        read_header(tmp_path / "absent.safetensors")
