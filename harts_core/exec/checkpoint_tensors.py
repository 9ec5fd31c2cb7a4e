"""The tensors of a run's checkpoint, in its two formats.

``whole``: the model in Hugging Face form and ``optimizer.safetensors``, gathered and written by the main
process. ``sharded``: every process writes its own parts (``harts_core.exec.parallel.sharded_save``). Either
can be read in any layout, each process reading only what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from harts_core.errors import DataError
from harts_core.exec.weights.hf_checkpoint import write_hf_checkpoint, write_model_config
from harts_core.exec.weights.regions import Region, flat_regions, whole_region
from harts_core.exec.weights.safetensors_file import SafetensorsReader, dtype_name, write_safetensors
from harts_core.exec.weights.safetensors_header import TensorInfo, read_header
from harts_core.exec.weights.sharded_checkpoint import (
    OPTIMIZER_PREFIX,
    RANDOM_STATE,
    ShardedReader,
    is_sharded,
    read_sharded_checkpoint,
)
from harts_core.files import sha256_file

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.model.decoder import HybridModel
    from harts_core.exec.model.spec import ModelSpec
    from harts_core.exec.optimizer import StateShard, StepOptimizer
    from harts_core.exec.parallel.job import Job
    from harts_core.exec.parallel.sharded_save import Part

OPTIMIZER = "optimizer.safetensors"


def save_whole(
    folder: Path,
    model: HybridModel,
    optimizer: StepOptimizer,
    extra_tensors: Mapping[str, Tensor],
    *,
    dtype: str,
    job: Job,
) -> None:
    """Gather whole tensors on the main process and write them; every process calls this.

    Args:
        folder: an existing one; the main process writes into it.
        model, optimizer: saved bit for bit.
        extra_tensors: tensors of the loaded checkpoint that the model does not use, written back.
        dtype: of the run, recorded in config.json.
        job: the processes that hold the model.
    """
    from harts_core.exec.optimizer import parameter_of

    weights = job.collect((name, t, t) for name, t in model.state_dict(keep_vars=True).items())
    parameters = dict(optimizer.parameters())
    moments = job.collect((name, t, parameters[parameter_of(name)]) for name, t in optimizer.named_state())
    if job.is_main:
        write_hf_checkpoint(folder, weights, model.config, dtype=dtype, extra_tensors=extra_tensors)
        write_safetensors(folder / OPTIMIZER, {**moments, **_random_state()})


def save_sharded(
    folder: Path,
    model: HybridModel,
    optimizer: StepOptimizer,
    extra_tensors: Mapping[str, Tensor],
    *,
    dtype: str,
    job: Job,
) -> dict[str, str]:
    """Write what this process holds; every process calls this.

    Args:
        folder: an existing, empty one that every process sees.
        model, optimizer, extra_tensors, dtype, job: see ``save_whole``.

    Returns:
        SHA-256 of the files that the processes have written, by name.

    Raises:
        DataError: a process cannot write.
    """
    from harts_core.exec.parallel.sharded_save import Part, files_of_rank, save_parts

    parts = {name: [_part(model, tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}
    parts |= _state_parts(optimizer, model.spec)
    others = {**extra_tensors, **(_random_state() if job.is_main else {})}
    for name, tensor in others.items():
        shape = tuple(tensor.shape)
        parts[name] = [Part(tensor, whole_region(shape), shape)]
    save_parts(folder, parts)
    if job.is_main:
        write_model_config(folder, model.config, dtype)
    hashes: dict[str, str] = {}
    for found in job.gather({path.name: sha256_file(path) for path in files_of_rank(folder)}):
        hashes |= found
    return hashes


def restore_optimizer(path: Path, optimizer: StepOptimizer, spec: ModelSpec) -> None:
    """Load a checkpoint's optimizer state and the random generators' states.

    Raises:
        CorruptFileError: a file is damaged.
        DataError: the state does not fit the model.
    """
    import torch

    tensors, reader, where = stored_state(path)
    _check_state(tensors, optimizer, spec, where)
    parameters = dict(optimizer.parameters())
    for kind, name in optimizer.state_names():
        for region, values in _boxes(optimizer.state_shard(kind, name), parameters[name], spec):
            values.copy_(reader.read(f"{kind}.{name}", region))
    random = {name: reader.read(name) for name in tensors if name.startswith(RANDOM_STATE)}
    if f"{RANDOM_STATE}cpu" in random:
        torch.set_rng_state(random[f"{RANDOM_STATE}cpu"])
    if f"{RANDOM_STATE}cuda" in random and _uses_cuda():
        torch.cuda.set_rng_state(random[f"{RANDOM_STATE}cuda"])


def stored_state(path: Path) -> tuple[Mapping[str, TensorInfo], SafetensorsReader | ShardedReader, str]:
    """What a checkpoint has beside the weights, in either format.

    Returns:
        Tensors by their names in the whole format (``exp_avg.NAME``, ``exp_avg_sq.NAME``, ``master.NAME``,
        ``random_state.cpu``); what reads them; the file or folder, for messages.

    Raises:
        DataError: a file is missing.
        CorruptFileError: a file is damaged.
    """
    if not is_sharded(path):
        tensors = read_header(path / OPTIMIZER)  # sizes are checked before anything is allocated
        return tensors, SafetensorsReader(tensors), str(path / OPTIMIZER)
    stored = {_plain_name(name): info for name, info in read_sharded_checkpoint(path).state.items()}
    return stored, ShardedReader(stored), str(path)


def _check_state(
    tensors: Mapping[str, TensorInfo], optimizer: StepOptimizer, spec: ModelSpec, where: str
) -> None:
    """The stored state must be that of the model; what other stages hold is not looked at."""
    from harts_core.exec.gradients import accumulation_dtype

    parameters = dict(optimizer.parameters())
    names = {f"{kind}.{name}": parameters[name] for kind, name in optimizer.state_names()}
    stored = {name for name in tensors if not name.startswith(RANDOM_STATE)}
    odd = sorted(names.keys() ^ stored if spec.stage.count == 1 else names.keys() - stored)
    if odd:
        raise DataError(f"the optimizer state does not fit the model: {odd[0]}", where=where)
    for name, parameter in names.items():
        shape = spec.shard_of(parameter).full_shape(parameter)
        dtype = dtype_name(accumulation_dtype(parameter))
        if (tensors[name].shape, tensors[name].dtype) != (shape, dtype):
            raise DataError(
                f"optimizer state {name} has shape {list(tensors[name].shape)} and dtype "
                f"{tensors[name].dtype}, not {list(shape)} and {dtype}",
                where=where,
            )


def _state_parts(optimizer: StepOptimizer, spec: ModelSpec) -> dict[str, list[Part]]:
    """This process's parts of the optimizer's state, under their names in the sharded format."""
    from harts_core.exec.parallel.sharded_save import Part

    parameters = dict(optimizer.parameters())
    parts = {}
    for kind, name in optimizer.state_names():
        shape = spec.shard_of(parameters[name]).full_shape(parameters[name])
        boxes = _boxes(optimizer.state_shard(kind, name), parameters[name], spec)
        stored = f"{OPTIMIZER_PREFIX}{'param' if kind == 'master' else kind}.{name}"
        parts[stored] = [Part(values, region, shape) for region, values in boxes]
    return parts


def _plain_name(name: str) -> str:
    """An entry of the sharded format, as it is called in the whole one."""
    plain = name.removeprefix(OPTIMIZER_PREFIX)
    return f"master.{plain.removeprefix('param.')}" if plain.startswith("param.") else plain


def _boxes(shard: StateShard, parameter: Tensor, spec: ModelSpec) -> Iterator[tuple[Region, Tensor]]:
    """A shard of a parameter's state as boxes of the whole tensor, each with its memory."""
    origin = spec.shard_of(parameter).region(parameter).start
    done = 0
    for box in flat_regions(tuple(parameter.shape), shard.start, shard.stop):
        yield box.moved(origin), shard.values[done : done + box.numel].view(box.shape)
        done += box.numel


def _part(model: HybridModel, tensor: Tensor) -> Part:
    from harts_core.exec.parallel.sharded_save import Part

    shard = model.spec.shard_of(tensor)
    return Part(tensor, shard.region(tensor), shard.full_shape(tensor))


def _uses_cuda() -> bool:
    """Whether this process does; asking for the generator's state would begin to."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _random_state() -> dict[str, Tensor]:
    import torch

    states = {f"{RANDOM_STATE}cpu": torch.get_rng_state()}
    if _uses_cuda():
        states[f"{RANDOM_STATE}cuda"] = torch.cuda.get_rng_state()
    return states
