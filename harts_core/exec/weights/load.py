"""From a checkpoint folder, of whatever format, into a model, of whatever layout.

A Hugging Face folder names each expert's matrices, a sharded checkpoint has one tensor for all experts of a
layer; everything else is called the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harts_core.errors import DataError
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.weights.hf_checkpoint import (
    HfCheckpoint,
    disk_views,
    is_extra_layer,
    is_fused,
    read_hf_checkpoint,
    some_names,
)
from harts_core.exec.weights.regions import Region
from harts_core.exec.weights.sharded_checkpoint import ShardedCheckpoint, is_sharded, read_sharded_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.model.decoder import HybridModel

StoredModel = HfCheckpoint | ShardedCheckpoint
"""Weights on disk, with their configuration."""

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def read_stored_model(path: Path) -> StoredModel:
    """Read a folder's configuration and what its tensors are, in either format. Imports no torch.

    Raises:
        DataError: a file is missing, or the folder is a run's.
        CorruptFileError: a file is damaged.
        ConfigError: config.json describes something else than a supported ``bailing_hybrid`` model.
    """
    path = Path(path)
    refuse_run_folder(path)
    return read_sharded_checkpoint(path) if is_sharded(path) else read_hf_checkpoint(path)


def refuse_run_folder(path: Path) -> None:
    """A run's folder has a config.json too, but it is not one of its checkpoints.

    Raises:
        DataError: ``path`` holds checkpoints.
    """
    found = sorted(path.glob("checkpoints/step-*"))
    if found:
        raise DataError(
            "the folder of a run, not a checkpoint",
            where=str(path),
            hint=f"name one of its checkpoints, such as {found[-1]}",
        )


def load_weights(model: HybridModel, stored: StoredModel) -> dict[str, Tensor]:
    """Copy stored weights into a model of the same config, converted to the parameters' dtypes.

    A rank of a split model reads its own parts only.

    Args:
        model: a ``HybridModel``.
        stored: from ``read_stored_model``.

    Returns:
        The tensors that the model does not use (multi-token-prediction layers), by name, unconverted.

    Raises:
        DataError: a tensor is missing, unexpected, of another shape or not of a float type. Nothing was
            copied then.
        CorruptFileError: a part of a tensor cannot be read.
    """
    import torch

    kept = check_tensors(stored)
    targets = _own_parts(model, fused_experts=stored.fused_experts)
    reader = stored.reader()
    extra: dict[str, Tensor] = {}
    with torch.no_grad():
        for name in stored.tensors:  # in the order of the files
            if name in targets:
                own, region = targets[name]
                own.copy_(reader.read(name, region))
            elif name in kept:
                extra[name] = reader.read(name)
    return extra


def model_shapes(config: ModelConfig, *, fused_experts: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a whole model's weights, in its order.

    Args:
        config: the model.
        fused_experts: whether a layer's routed experts are one tensor.
    """
    import torch

    from harts_core.exec.model.decoder import HybridModel

    with torch.device("meta"):
        whole = HybridModel(config, dtype=torch.float32, seed=None)
    return {
        name: tuple(view.shape)
        for key, value in whole.state_dict().items()
        for name, view in ([(key, value)] if fused_experts else disk_views(key, value))
    }


def check_tensors(stored: StoredModel) -> set[str]:
    """Compare what is stored with the model of its configuration.

    Returns:
        Names that the model does not use but keeps; everything else matches exactly.

    Raises:
        DataError: it does not.
    """
    expected = model_shapes(stored.config, fused_experts=stored.fused_experts)
    found = stored.tensors
    missing = sorted(expected.keys() - found.keys())
    unused = sorted(found.keys() - expected.keys())
    kept = {name for name in unused if is_extra_layer(name, stored.config.num_hidden_layers)}
    unexpected = [name for name in unused if name not in kept]
    where = str(stored.path)
    if missing:
        also = f"; unexpected: {some_names(unexpected)}" if unexpected else ""
        raise DataError(f"the checkpoint lacks tensors: {some_names(missing)}{also}", where=where)
    if unexpected:
        raise DataError(
            f"the checkpoint has tensors that the model lacks: {some_names(unexpected)}", where=where
        )
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


def _own_parts(model: HybridModel, *, fused_experts: bool) -> dict[str, tuple[Tensor, Region | None]]:
    """What a rank holds, by stored name: its memory, and which part of the stored tensor that is."""
    parts: dict[str, tuple[Tensor, Region | None]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        shard = model.spec.shard_of(value)
        if is_fused(key) and not fused_experts:
            views = disk_views(key, value, shard.index * len(value))
            parts |= {name: (view, None) for name, view in views}
        else:
            parts[key] = (value, shard.region(value))
    return parts
