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
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harts_core.errors import ConfigError, CorruptFileError, DataError
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.weights.safetensors_file import SafetensorsFile, SafetensorsReader, dtype_name
from harts_core.exec.weights.safetensors_header import ITEM_BYTES, TensorInfo, read_header

if TYPE_CHECKING:
    from torch import Tensor


CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ARCHITECTURE = "BailingHybridForCausalLM"
MAX_SHARD_BYTES = 5_000_000_000

Form = tuple[str, tuple[int, ...]]
"""safetensors' name of a dtype, and a shape."""

_FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<matrix>gate_proj|up_proj|down_proj)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfCheckpoint:
    """A checkpoint folder whose configuration and headers were read and checked; no weights yet.

    Attributes:
        path: the folder.
        config: the model's shape, with unknown keys in ``config.extra``.
        tensors: name on disk to where and what it is.
        fused_experts: a layer's routed experts are one tensor; here each is one of its own.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    fused_experts: bool = False

    def reader(self) -> SafetensorsReader:
        """Of the weights."""
        return SafetensorsReader(self.tensors)


def read_hf_checkpoint(path: Path) -> HfCheckpoint:
    """Read config.json and the safetensors headers of a folder. Imports no torch.

    Raises:
        DataError: a file is missing, or the index and the shards disagree.
        CorruptFileError: a file is damaged.
        ConfigError: config.json describes something else than a supported ``bailing_hybrid`` model.
    """
    path = Path(path)
    config = read_model_config(path)
    if (path / INDEX).is_file():
        return HfCheckpoint(path=path, config=config, tensors=_read_shards(path))
    if not (path / SINGLE).is_file():
        raise DataError(f"the checkpoint has neither {SINGLE} nor {INDEX}", where=str(path))
    return HfCheckpoint(path=path, config=config, tensors=read_header(path / SINGLE))


def read_model_config(path: Path) -> ModelConfig:
    """Read a folder's config.json.

    Raises:
        DataError: there is none.
        CorruptFileError: it is not JSON.
        ConfigError: it describes something else than a supported ``bailing_hybrid`` model.
    """
    if not (path / CONFIG).is_file():
        raise DataError(
            f"not a checkpoint: no {CONFIG}",
            where=str(path),
            hint="name a folder with config.json and model.safetensors",
        )
    try:
        return ModelConfig.from_dict(_read_json(path / CONFIG))
    except ConfigError as error:
        raise ConfigError(error.what, where=str(path / CONFIG), hint=error.hint) from None


def write_hf_checkpoint(
    folder: Path,
    state: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    dtype: str,
    extra_tensors: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """``stream_hf_checkpoint`` of tensors that are at hand.

    Args:
        folder: an existing folder.
        state: the whole model's ``state_dict``.
        config, dtype, max_shard_bytes: see there.
        extra_tensors: tensors of ``load_weights`` to write back.
    """
    tensors = {**state, **(extra_tensors or {})}
    forms = {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
    stream_hf_checkpoint(folder, forms, tensors.items(), config, dtype=dtype, max_shard_bytes=max_shard_bytes)


def stream_hf_checkpoint(
    folder: Path,
    forms: Mapping[str, Form],
    tensors: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    *,
    dtype: str,
    max_shard_bytes: int | None = None,
) -> None:
    """Write config.json and the weights into an existing folder, every tensor in its own dtype.

    Tensors are written as they come and not kept. Not atomic by itself: call it within ``atomic_directory``.

    Args:
        folder: an existing folder.
        forms: dtype (safetensors' name) and shape of each entry of the whole model's state and of each tensor
            beyond it. Files are filled in the order of the model's, then by name.
        tensors: these, in any order.
        config: the model's configuration; unknown keys that were read are written back.
        dtype: of the run (``float32``, …), recorded in config.json.
        max_shard_bytes: weights above this size are cut into shards with an index; None: MAX_SHARD_BYTES.

    Raises:
        OSError: a file cannot be written.
    """
    write_model_config(folder, config, dtype)
    extra = sorted(key for key in forms if is_extra_layer(key, config.num_hidden_layers))
    ordered = [*(key for key in forms if key not in extra), *extra]
    disk = {name: form for key in ordered for name, form in _disk_forms(key, forms[key])}
    shards = list(_cut_shards(disk, max_shard_bytes or MAX_SHARD_BYTES))
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [SINGLE]
    outputs: dict[str, SafetensorsFile] = {}
    with ExitStack() as stack:
        for file, shard in zip(files, shards, strict=True):
            out = stack.enter_context(SafetensorsFile(folder / file, shard, {"format": "pt"}))
            outputs |= dict.fromkeys(shard, out)
        for key, tensor in tensors:
            for name, view in disk_views(key, tensor):
                outputs[name].write(name, view)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(_num_bytes(form) for form in disk.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_model_config(folder: Path, config: ModelConfig, dtype: str) -> None:
    """Write config.json, with ``dtype`` (of the run), into a folder."""
    values = {"architectures": [ARCHITECTURE], **config.to_dict(), "dtype": dtype}
    values.pop("torch_dtype", None)  # the older name of dtype
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
        yield _expert_name(fused, first_expert + expert), tensor[expert]


def is_fused(key: str) -> bool:
    """Whether a name in the model's state is that of a layer's routed experts."""
    return _FUSED.fullmatch(key) is not None


def is_extra_layer(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a layer beyond the model's."""
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers


def some_names(names: list[str], shown: int = 3) -> str:
    """The first few, for messages."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _disk_forms(key: str, form: Form) -> Iterator[tuple[str, Form]]:
    """``disk_views`` without the tensor."""
    fused = _FUSED.fullmatch(key)
    if fused is None:
        yield key, form
        return
    dtype, shape = form
    for expert in range(shape[0]):
        yield _expert_name(fused, expert), (dtype, shape[1:])


def _expert_name(fused: re.Match[str], expert: int) -> str:
    return f"{fused['experts']}.{expert}.{fused['matrix']}.weight"


def _num_bytes(form: Form) -> int:
    dtype, shape = form
    return math.prod(shape) * ITEM_BYTES[dtype]


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
                f"the index and {file} disagree about {some_names(sorted(header.keys() ^ named))}",
                where=str(path / INDEX),
            )
        tensors |= header
    return tensors


def _cut_shards(forms: Mapping[str, Form], max_bytes: int) -> Iterator[dict[str, Form]]:
    shard: dict[str, Form] = {}
    size = 0
    for name, form in forms.items():
        if shard and size + _num_bytes(form) > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = form
        size += _num_bytes(form)
    yield shard
