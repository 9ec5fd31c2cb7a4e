"""Reading and writing Hugging Face ``bailing_hybrid`` checkpoints.

A checkpoint is a folder with ``config.json`` and either ``model.safetensors`` or shards named by
``model.safetensors.index.json``. Tensor names on disk are those of the published weights (transformers
renames and fuses them in memory, and writes the published names again). The model's parameter names equal
them except for the routed experts: ``mlp.experts.gate_proj`` [E, out, in] in memory is
``mlp.experts.{e}.gate_proj.weight`` on disk, and likewise ``up_proj`` and ``down_proj``.

Layers beyond ``num_hidden_layers`` are multi-token-prediction layers: kept as they are and written back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harts_core.errors import ConfigError, CorruptFileError, DataError
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.weights.safetensors_header import TensorInfo, read_header

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.model.decoder import HybridModel
    from harts_core.exec.model.spec import Shard

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ARCHITECTURE = "BailingHybridForCausalLM"
MAX_SHARD_BYTES = 5_000_000_000
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")

_FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<matrix>gate_proj|up_proj|down_proj)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfCheckpoint:
    """A checkpoint folder whose configuration and headers were read and checked; no weights yet.

    Attributes:
        path: the folder.
        config: the model's shape, with unknown keys in ``config.extra``.
        tensors: name on disk to where and what it is.
    """

    path: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]


def read_hf_checkpoint(path: Path) -> HfCheckpoint:
    """Read config.json and the safetensors headers of a folder. Imports no torch.

    Raises:
        DataError: a file is missing, or the index and the shards disagree.
        CorruptFileError: a file is damaged.
        ConfigError: config.json describes something else than a supported ``bailing_hybrid`` model.
    """
    path = Path(path)
    if not (path / CONFIG).is_file():
        raise DataError(
            f"not a checkpoint: no {CONFIG}",
            where=str(path),
            hint="name a folder with config.json and model.safetensors",
        )
    try:
        config = ModelConfig.from_dict(_read_json(path / CONFIG))
    except ConfigError as error:
        raise ConfigError(error.what, where=str(path / CONFIG), hint=error.hint) from None
    if (path / INDEX).is_file():
        return HfCheckpoint(path=path, config=config, tensors=_read_shards(path))
    if not (path / SINGLE).is_file():
        raise DataError(f"the checkpoint has neither {SINGLE} nor {INDEX}", where=str(path))
    return HfCheckpoint(path=path, config=config, tensors=read_header(path / SINGLE))


def load_weights(model: HybridModel, checkpoint: HfCheckpoint) -> dict[str, Tensor]:
    """Copy a checkpoint's weights into a model of the same config, converted to the parameters' dtypes.

    A rank of a split model reads its own parts only.

    Args:
        model: a ``HybridModel``.
        checkpoint: the folder, already checked by ``read_hf_checkpoint``.

    Returns:
        The tensors that the model does not use (multi-token-prediction layers), by name, unconverted.

    Raises:
        DataError: a tensor is missing, unexpected, of another shape or not of a float type. Nothing was
            copied then.
    """
    import torch
    from safetensors import safe_open

    targets = _own_parts(model)
    kept = _check_tensors(checkpoint, _whole_shapes(model))
    extra: dict[str, Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for name, info in checkpoint.tensors.items():
        by_file.setdefault(info.file, []).append(name)
    with torch.no_grad():
        for file, names in by_file.items():
            with safe_open(str(file), framework="pt") as reader:
                for name in names:
                    if name in kept:
                        extra[name] = reader.get_tensor(name)
                    elif name in targets:
                        own, shard = targets[name]
                        own.copy_(read_part(reader, name, shard))
    return extra


def write_hf_checkpoint(
    folder: Path,
    state: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    dtype: str,
    extra_tensors: dict[str, Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json and the weights into an existing folder, every tensor in its own dtype.

    Not atomic by itself: call it within ``atomic_directory``.

    Args:
        folder: an existing folder.
        state: the whole model's ``state_dict``.
        config: its configuration; unknown keys that were read are written back.
        dtype: of the run (``float32``, …), recorded in config.json.
        extra_tensors: tensors of ``load_weights`` to write back.
        max_shard_bytes: weights above this size are cut into shards with an index.
    """
    tensors = {name: view for key, value in state.items() for name, view in disk_views(key, value)}
    tensors |= extra_tensors or {}
    values = {"architectures": [ARCHITECTURE], **config.to_dict(), "dtype": dtype}
    values.pop("torch_dtype", None)  # the older name of dtype
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shards = list(_cut_shards(tensors, max_shard_bytes))
    if len(shards) == 1:
        save_tensors(folder / SINGLE, shards[0], {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(folder / file, shard, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def disk_views(key: str, tensor: Tensor, first_expert: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The names on disk of one entry of the model's state, each with its view of the memory.

    Args:
        key: name in the model's state.
        tensor: its value.
        first_expert: of fused experts, the number of the first.
    """
    fused = _FUSED.fullmatch(key)
    if fused is None:
        yield key, tensor
        return
    for expert in range(len(tensor)):
        yield f"{fused['experts']}.{first_expert + expert}.{fused['matrix']}.weight", tensor[expert]


def read_part(reader: Any, name: str, shard: Shard) -> Tensor:
    """This rank's part of a tensor in an open safetensors file; only that is read."""
    if shard.count == 1:
        whole: Tensor = reader.get_tensor(name)
        return whole
    view = reader.get_slice(name)
    size = view.get_shape()[shard.dim] // shard.count
    index = (slice(None),) * shard.dim + (slice(shard.index * size, (shard.index + 1) * size),)
    part: Tensor = view[index]
    return part


def _own_parts(model: HybridModel) -> dict[str, tuple[Tensor, Shard]]:
    """What a rank holds, by name on disk: its memory, and which part of the tensor on disk that is."""
    from harts_core.exec.model.spec import WHOLE

    parts: dict[str, tuple[Tensor, Shard]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        shard = model.spec.shard_of(value)
        if _FUSED.fullmatch(key):
            views = disk_views(key, value, shard.index * len(value))
            parts |= {name: (view, WHOLE) for name, view in views}
        else:
            parts[key] = (value, shard)
    return parts


def _whole_shapes(model: HybridModel) -> dict[str, tuple[int, ...]]:
    """Names and shapes on disk of the whole model, also of what other ranks hold."""
    import torch

    with torch.device("meta"):
        whole = type(model)(model.config, dtype=model.dtype, seed=None)
    return {
        name: tuple(view.shape)
        for key, value in whole.state_dict().items()
        for name, view in disk_views(key, value)
    }


def _check_tensors(checkpoint: HfCheckpoint, expected: dict[str, tuple[int, ...]]) -> set[str]:
    """Names on disk that the model does not use but keeps; everything else must match exactly."""
    found = checkpoint.tensors
    missing = sorted(expected.keys() - found.keys())
    unused = sorted(found.keys() - expected.keys())
    kept = {name for name in unused if _is_extra_layer(name, checkpoint.config.num_hidden_layers)}
    unexpected = [name for name in unused if name not in kept]
    where = str(checkpoint.path)
    if missing:
        also = f"; unexpected: {_some(unexpected)}" if unexpected else ""
        raise DataError(f"the checkpoint lacks tensors: {_some(missing)}{also}", where=where)
    if unexpected:
        raise DataError(f"the checkpoint has tensors that the model lacks: {_some(unexpected)}", where=where)
    for name, shape in expected.items():
        info = found[name]
        if info.shape != shape:
            raise DataError(
                f"tensor {name} has shape {list(info.shape)}, the model needs {list(shape)}",
                where=str(info.file),
                hint="config.json and the weights belong to different models",
            )
        if info.dtype not in FLOAT_DTYPES:
            raise DataError(
                f"tensor {name} has dtype {info.dtype}, not one of {', '.join(FLOAT_DTYPES)}",
                where=str(info.file),
                hint="quantised checkpoints must be converted first",
            )
    return kept


def _is_extra_layer(name: str, num_layers: int) -> bool:
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers


def _some(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise CorruptFileError(f"not JSON ({error})", where=str(file)) from error
    if not isinstance(values, dict):
        raise CorruptFileError("not a JSON object", where=str(file))
    return values


def _read_shards(path: Path) -> dict[str, TensorInfo]:
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CorruptFileError("the index has no weight_map from names to files", where=str(path / INDEX))
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise DataError(f"the index names a file outside the folder: {file}", where=str(path / INDEX))
        header = read_header(path / file)
        named = {name for name, f in weight_map.items() if f == file}
        if header.keys() != named:
            raise DataError(
                f"the index and {file} disagree about {_some(sorted(header.keys() ^ named))}",
                where=str(path / INDEX),
            )
        tensors |= header
    return tensors


def _cut_shards(tensors: dict[str, Tensor], max_bytes: int) -> Iterable[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += num_bytes
    yield shard


def save_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write one safetensors file, from any device.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # experts are views of one tensor; safetensors wants each in memory of its own
    copies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    try:
        save_file(copies, str(file), metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
