"""Reading parts of safetensors files, and writing them tensor by tensor.

The safetensors library writes a file from tensors that are all in memory. Here the header goes first, from
shapes alone, and each tensor is written to its place when it is at hand. The bytes are those that the library
would write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from harts_core.exec.weights.regions import Region
from harts_core.exec.weights.safetensors_header import ITEM_BYTES, TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
"""Tensors of wide dtypes come first, so that each is aligned; in the library's order."""


def torch_dtypes() -> dict[str, torch.dtype]:
    """safetensors' names of dtypes."""
    import torch

    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype."""
    return next(name for name, known in torch_dtypes().items() if known == dtype)


class SafetensorsReader:
    """Reads tensors, or parts of them, from files whose headers have been read.

    Args:
        tensors: name to where it is.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors
        self._open: dict[Path, Any] = {}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A tensor, or a part of it; only that is read."""
        from safetensors import safe_open

        file = self._tensors[name].file
        if file not in self._open:
            self._open[file] = safe_open(str(file), framework="pt")
        whole = region is None or region.shape == self._tensors[name].shape
        found: Tensor = (
            self._open[file].get_tensor(name)
            if whole or region is None
            else self._open[file].get_slice(name)[region.slices()]
        )
        return found


class SafetensorsFile:
    """A file that is being written; use it as a context manager.

    Args:
        file: to write.
        tensors: name to dtype (safetensors' name) and shape.
        metadata: text in the header.
    """

    def __init__(
        self,
        file: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        stop = 0
        for name in sorted(tensors, key=lambda name: (_ORDER.index(tensors[name][0]), name)):
            dtype, shape = tensors[name]
            start, stop = stop, stop + math.prod(shape) * ITEM_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        self._file, self._header, self._begin, self._size = file, header, 8 + len(raw), 8 + len(raw) + stop
        self._head = len(raw).to_bytes(8, "little") + raw
        self._stream: IO[bytes] | None = None
        self._missing = set(tensors)

    def __enter__(self) -> SafetensorsFile:
        self._stream = open(self._file, "wb")
        self._stream.write(self._head)
        self._stream.truncate(self._size)
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors, from any device.

        Raises:
            OSError: it cannot be written.
        """
        import torch

        assert self._stream is not None
        start, stop = self._header[name]["data_offsets"]
        bytes_ = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        assert bytes_.numel() == stop - start, name
        self._stream.seek(self._begin + start)
        self._stream.write(bytes_.numpy().data)
        self._missing.discard(name)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        assert self._stream is not None
        self._stream.close()
        assert error is not None or not self._missing, self._missing  # they would be zeros in the file


def write_safetensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors that are at hand; they may be parts of one another.

    Raises:
        OSError: it cannot be written.
    """
    forms = {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
    with SafetensorsFile(file, forms, metadata) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)
