"""Checkpoints of a training run: folders ``step-000003`` that a later run continues bit for bit.

Each holds the model in Hugging Face form (config.json, safetensors), ``optimizer.safetensors`` (moments,
master weights, random state) and ``state.json`` (step, seed, plans, hashes of the files). A folder appears
under its name only when it is complete; whatever has another name is left over from an interrupted write.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harts_core.errors import ConfigError, CorruptFileError, DataError
from harts_core.exec.weights.hf_checkpoint import read_part, save_tensors, write_hf_checkpoint
from harts_core.exec.weights.safetensors_header import read_header
from harts_core.files import FolderKind, atomic_directory, sha256_file

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.model.decoder import HybridModel
    from harts_core.exec.model.spec import ModelSpec
    from harts_core.exec.optimizer import StepOptimizer
    from harts_core.exec.parallel.job import Job

T = TypeVar("T")

FORMAT = "harts-checkpoint"
VERSION = 1
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
RANDOM_STATE = "random_state."
"""Prefix of the generators' states beside the optimizer's tensors."""

FOLDER = FolderKind(
    marker=STATE, format=FORMAT, names=("config.json", "model*.safetensors", "*.index.json", OPTIMIZER, STATE)
)

_NAME = re.compile(r"step-(\d{6,})")
_DEBRIS = re.compile(r"\.step-\d{6,}\..*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands.

    Attributes:
        step: optimizer steps taken.
        seed: of the run.
        dtype: of the run.
        plans: SHA-256 of each plan's plan.json, in training order.
    """

    step: int
    seed: int
    dtype: str
    plans: tuple[str, ...]


def checkpoint_name(step: int) -> str:
    """The folder name of a checkpoint."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's folder name.

    Raises:
        ValueError: another name.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run's ``checkpoints`` folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def save_checkpoint(
    folder: Path,
    model: HybridModel,
    optimizer: StepOptimizer,
    state: RunState,
    *,
    extra_tensors: dict[str, Tensor],
    keep: int,
    job: Job,
) -> Path:
    """Write a checkpoint atomically, then remove all but the ``keep`` newest.

    Every process of the job calls this; the main one writes whole tensors, so that a run goes on with any
    number of processes.

    Args:
        folder: the run's ``checkpoints`` folder; it exists.
        model, optimizer: saved bit for bit.
        state: where the run stands.
        extra_tensors: tensors of the loaded checkpoint that the model does not use, written back.
        keep: ≥ 1.
        job: the processes that hold the model.

    Returns:
        The checkpoint's folder.
    """
    from harts_core.exec.optimizer import parameter_of

    path = folder / checkpoint_name(state.step)
    weights = job.collect((name, t, t) for name, t in model.state_dict(keep_vars=True).items())
    parameters = dict(optimizer.parameters())
    moments = job.collect((name, t, parameters[parameter_of(name)]) for name, t in optimizer.named_state())
    if not job.is_main:
        return path
    with atomic_directory(path, replaces=FOLDER) as temporary:
        write_hf_checkpoint(temporary, weights, model.config, dtype=state.dtype, extra_tensors=extra_tensors)
        tensors = {**moments, **_random_state()}
        save_tensors(temporary / OPTIMIZER, tensors)
        hashes = {p.name: sha256_file(p) for p in sorted(temporary.iterdir())}
        values = {"format": FORMAT, "version": VERSION, **asdict(state), "files": hashes}
        (temporary / STATE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    for old in list_checkpoints(folder)[:-keep]:
        _remove(old)
    return path


def read_state(path: Path) -> RunState:
    """Read a checkpoint's state.json and check the hashes of the other files.

    Raises:
        DataError: not a HARTS checkpoint.
        CorruptFileError: a file is damaged, missing or does not match its hash.
    """
    file = path / STATE
    if not file.is_file():
        raise DataError(f"not a checkpoint of a run: no {STATE}", where=str(path))
    try:
        values = json.loads(file.read_bytes())
        if values["format"] != FORMAT or values["version"] != VERSION:
            raise ValueError(f"format {values['format']}, version {values['version']}")
        state = RunState(
            step=_as(int, values["step"]),
            seed=_as(int, values["seed"]),
            dtype=_as(str, values["dtype"]),
            plans=tuple(_as(str, plan) for plan in values["plans"]),
        )
        hashes = dict(values["files"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFileError(f"not the state of a checkpoint ({error})", where=str(file)) from error
    if path.name != checkpoint_name(state.step):
        raise CorruptFileError(f"{STATE} is of step {state.step}, the folder of another", where=str(path))
    for name, expected in hashes.items():
        if Path(name).name != name or not (path / name).is_file():
            raise CorruptFileError("the checkpoint lacks a file", where=str(path / name))
        if sha256_file(path / name) != expected:
            raise CorruptFileError(f"the file does not match its hash in {STATE}", where=str(path / name))
    return state


def _as(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


@contextmanager
def falling_back(path: Path | None) -> Iterator[None]:
    """Add to what is wrong with the checkpoint that a run resumes from how to do without it.

    Args:
        path: the checkpoint; None: the run does not resume, and errors pass unchanged.
    """
    try:
        yield
    except (DataError, ConfigError) as error:
        if path is None:
            raise
        hint = f"remove {path}: --resume then continues from the checkpoint before it, or starts again"
        raise type(error)(error.what, where=error.where, hint=hint) from error


def restore_optimizer(path: Path, optimizer: StepOptimizer, spec: ModelSpec) -> None:
    """Load a checkpoint's optimizer state and the random generators' states.

    A rank of a split model reads its own parts only.

    Raises:
        CorruptFileError: the file is damaged.
        DataError: the state does not fit the model.
    """
    import torch
    from safetensors import safe_open

    from harts_core.exec.model.spec import WHOLE
    from harts_core.exec.optimizer import parameter_of

    file = path / OPTIMIZER
    header = read_header(file)  # sizes are checked before anything is allocated
    parameters = dict(optimizer.parameters())
    tensors, random = {}, {}
    with safe_open(str(file), framework="pt") as reader:
        for name in header:
            if name.startswith(RANDOM_STATE):
                random[name] = reader.get_tensor(name)
                continue
            like = parameters.get(parameter_of(name))
            if like is None and spec.stage.count > 1:
                continue  # of another stage
            tensors[name] = read_part(reader, name, WHOLE if like is None else spec.shard_of(like))
    optimizer.load_state_tensors(tensors, str(file))
    if f"{RANDOM_STATE}cpu" in random:
        torch.set_rng_state(random[f"{RANDOM_STATE}cpu"])
    if f"{RANDOM_STATE}cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random[f"{RANDOM_STATE}cuda"])


def remove_debris(folder: Path) -> None:
    """Remove what interrupted writes left in a ``checkpoints`` folder."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _DEBRIS.fullmatch(path.name):
                shutil.rmtree(path)


def check_same_config(stored: dict[str, Any], current: dict[str, Any], where: str) -> None:
    """Refuse to continue a run under a configuration that would change it.

    Raises:
        ConfigError: a table differs in a key other than ``MAY_CHANGE``; the keys are named.
    """
    changed = [
        f"[{table}] {key}: {stored.get(table, {}).get(key)!r} → {current.get(table, {}).get(key)!r}"
        for table in sorted(stored.keys() | current.keys())
        for key in sorted(stored.get(table, {}).keys() | current.get(table, {}).keys())
        if stored.get(table, {}).get(key) != current.get(table, {}).get(key)
        and (table, key) not in MAY_CHANGE
    ]
    if changed:
        raise ConfigError(
            f"the configuration differs from the run's: {'; '.join(changed)}",
            where=where,
            hint="to change it, start another run with --checkpoint",
        )


MAY_CHANGE = {
    *(("runtime", key) for key in ("threads", "checkpoint_every", "keep_checkpoints", "memory_budget_bytes")),
    *(("parallel", key) for key in ("dp", "tp", "sp", "pp", "ep", "distributed_optimizer", "timeout_s")),
}
"""Keys that a resumed run may change."""


def _random_state() -> dict[str, Tensor]:
    import torch

    states = {f"{RANDOM_STATE}cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{RANDOM_STATE}cuda"] = torch.cuda.get_rng_state()
    return states


def _remove(path: Path) -> None:
    """Rename first: an interrupted removal must not leave half a checkpoint under a valid name."""
    hidden = path.with_name(f".{path.name}.old")
    os.rename(path, hidden)
    shutil.rmtree(hidden)
