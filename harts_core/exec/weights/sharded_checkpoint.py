"""Reading sharded checkpoints: any part of any tensor, in any process, whatever the layout that wrote them.

The files are those of Megatron-core's dist_checkpointing (``torch_dist``). Its own reader unpickles the index
and needs a process group; this one does neither, so that one process reads a checkpoint of many.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harts_core.errors import CorruptFileError
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.weights.hf_checkpoint import read_model_config
from harts_core.exec.weights.regions import Region, whole_region
from harts_core.exec.weights.safetensors_file import dtype_name, torch_dtypes
from harts_core.exec.weights.torch_dist_index import INDEX, Chunk, ShardedTensorInfo, read_index

if TYPE_CHECKING:
    from torch import Tensor

BACKEND = "metadata.json"
"""Megatron-core's note about how the tensors are stored."""

OPTIMIZER_PREFIX = "optimizer.state."
RANDOM_STATE = "random_state."
"""Prefix of the generators' states, in both formats of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedCheckpoint:
    """A folder whose configuration and index were read and checked; no tensors yet.

    Attributes:
        path: the folder.
        config: the model's shape, with unknown keys in ``config.extra``.
        tensors: the weights by their names in the model's state.
        state: the optimizer's state and the generators' states.
        fused_experts: a layer's routed experts are one tensor.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, ShardedTensorInfo]
    state: Mapping[str, ShardedTensorInfo]
    fused_experts: bool = True

    def reader(self) -> ShardedReader:
        """Of the weights and the state."""
        return ShardedReader({**self.tensors, **self.state})


def is_sharded(path: Path) -> bool:
    """Whether a folder looks like a sharded checkpoint; it may be damaged."""
    return (path / INDEX).exists() or (path / BACKEND).exists()


def read_sharded_checkpoint(path: Path) -> ShardedCheckpoint:
    """Read config.json and the index of a folder. Imports no torch.

    Raises:
        DataError: a file is missing.
        CorruptFileError: a file is damaged.
        ConfigError: config.json describes something else than a supported ``bailing_hybrid`` model.
    """
    config, index = read_model_config(path), read_index(path)
    state = {n: info for n, info in index.items() if n.startswith((OPTIMIZER_PREFIX, RANDOM_STATE))}
    return ShardedCheckpoint(
        path=path,
        config=config,
        tensors={name: info for name, info in index.items() if name not in state},
        state=state,
    )


class ShardedReader:
    """Reads tensors, or parts of them; one stored part at a time is in memory beside the result.

    Args:
        tensors: of the index.
    """

    def __init__(self, tensors: Mapping[str, ShardedTensorInfo]) -> None:
        self._tensors = tensors
        self._last: tuple[Chunk, Tensor] | None = None

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A tensor, or a part of it.

        Raises:
            CorruptFileError: the stored parts are damaged, or do not cover it.
        """
        import torch

        info = self._tensors[name]
        wanted = whole_region(info.shape) if region is None else region
        result = torch.empty(wanted.shape, dtype=torch_dtypes()[info.dtype])
        missing = wanted.numel
        for chunk in info.chunks:
            part = wanted.overlap(chunk.region)
            if part is None:
                continue
            stored = self._load(chunk, info)
            if part == wanted == chunk.region:
                return stored
            result[part.slices(wanted.start)] = stored[part.slices(chunk.region.start)]
            missing -= part.numel
        if missing:
            raise CorruptFileError("its parts are not the whole tensor", where=f"{info.file}, tensor {name}")
        return result

    def _load(self, chunk: Chunk, info: ShardedTensorInfo) -> Tensor:
        """A stored part; the last one is kept, as the next read often wants more of it."""
        import torch

        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        self._last = None
        try:
            with open(chunk.file, "rb") as f:
                f.seek(chunk.offset)
                raw = io.BytesIO(f.read(chunk.length))
            with zipfile.ZipFile(raw) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > chunk.length:
                raise ValueError("it is compressed")
            raw.seek(0)
            tensor = torch.load(raw, map_location="cpu", weights_only=True)
            if tensor.layout != torch.strided or tensor.device.type != "cpu":
                raise ValueError("it is no plain tensor")
            found = (dtype_name(tensor.dtype), tuple(tensor.shape))
            if found != (info.dtype, chunk.region.shape):
                raise ValueError(f"it is {found}, not {(info.dtype, chunk.region.shape)}")
        except Exception as error:  # of a damaged archive anything can come
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CorruptFileError(
                f"the part at byte {chunk.offset} cannot be read ({reason})", where=str(chunk.file)
            ) from error
        self._last = (chunk, tensor)
        stored: Tensor = tensor
        return stored
