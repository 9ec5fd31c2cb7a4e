"""Checkpoints of a training run: folders ``step-000003`` that a later run continues.

Each holds the model and the optimizer's state in one of two formats (``harts_core.exec.checkpoint_tensors``),
and ``state.json`` (step, seed, plans, hashes of the files). A folder appears under its name only when it is
complete; whatever has another name is left over from an interrupted write.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harts_core.errors import ConfigError, CorruptFileError, DataError
from harts_core.exec.checkpoint_tensors import OPTIMIZER, save_sharded, save_whole
from harts_core.exec.config import ParallelSection
from harts_core.exec.weights.sharded_checkpoint import is_sharded
from harts_core.files import FolderKind, atomic_directory, sha256_file, states_format

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.model.decoder import HybridModel
    from harts_core.exec.optimizer import StepOptimizer
    from harts_core.exec.parallel.job import Job

T = TypeVar("T")

FORMAT = "harts-checkpoint"
VERSION = 1
STATE = "state.json"

FOLDER = FolderKind(
    marker=STATE,
    format=FORMAT,
    names=(
        *("config.json", "model*.safetensors", "*.index.json", OPTIMIZER, STATE),
        *(".metadata", "metadata.json", "common.pt", "*.distcp"),  # sharded
    ),
)

SHARED = "the run folder must be on a file system that all processes share"

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
    sharded: bool,
    extra_tensors: dict[str, Tensor],
    keep: int,
    job: Job,
) -> Path:
    """Write a checkpoint atomically, then remove all but the ``keep`` newest.

    Every process of the job calls this. Neither format says anything about the processes, so a run goes on
    with any number of them.

    Args:
        folder: the run's ``checkpoints`` folder; it exists.
        model, optimizer: saved bit for bit.
        state: where the run stands.
        sharded: every process writes its own parts; else the main one writes whole tensors.
        extra_tensors: tensors of the loaded checkpoint that the model does not use, written back.
        keep: ≥ 1.
        job: the processes that hold the model.

    Returns:
        The checkpoint's folder.

    Raises:
        DataError: the operating system refuses the write.
    """
    path = folder / checkpoint_name(state.step)
    with _writing(path, job) as temporary:
        hashes: dict[str, str] = {}
        if sharded:
            hashes = save_sharded(temporary, model, optimizer, extra_tensors, dtype=state.dtype, job=job)
        else:
            save_whole(temporary, model, optimizer, extra_tensors, dtype=state.dtype, job=job)
        if job.is_main:
            _write_state(temporary, state, hashes)
    if job.is_main:
        for old in list_checkpoints(folder)[:-keep]:
            _remove(old)
    return path


@contextmanager
def _writing(path: Path, job: Job) -> Iterator[Path]:
    """A folder that all processes fill and the main one makes and renames."""
    if not job.is_main:
        yield Path(job.gather("")[0])
    else:
        with atomic_directory(path, replaces=FOLDER) as temporary:
            job.gather(str(temporary))
            yield temporary
    job.wait()


def _write_state(folder: Path, state: RunState, hashes: dict[str, str]) -> None:
    """Write state.json, with the hashes of all other files.

    Args:
        folder: complete but for this file.
        state: where the run stands.
        hashes: those that are known.
    """
    lost = [name for name in hashes if not (folder / name).is_file()]
    if lost:
        raise DataError(f"{lost[0]} is not where another process wrote it", where=str(folder), hint=SHARED)
    found = {p.name: hashes.get(p.name) or sha256_file(p) for p in sorted(folder.iterdir())}
    values = {"format": FORMAT, "version": VERSION, **asdict(state), "files": found}
    (folder / STATE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def read_state(path: Path) -> RunState:
    """Read a checkpoint's state.json.

    Raises:
        DataError: not a HARTS checkpoint.
        CorruptFileError: the file is damaged.
    """
    return _read_state(path)[0]


def state_in_run(path: Path) -> RunState:
    """``read_state`` of a folder among a run's checkpoints.

    Raises:
        DataError, CorruptFileError: see there; also where the state is of another step than the folder's.
    """
    state = read_state(path)
    if path.name != checkpoint_name(state.step):
        raise CorruptFileError(f"{STATE} is of step {state.step}, the folder of another", where=str(path))
    return state


def check_files(path: Path, job: Job) -> None:
    """Compare the files of a checkpoint with the hashes in its state.json, each file in one process.

    A Hugging Face folder that is no run's checkpoint has no hashes, and passes. A sharded one has them.

    Args:
        path: the folder.
        job: its processes share the work, and raise together.

    Raises:
        CorruptFileError: a file is damaged, missing or does not match its hash.
    """
    if not (states_format(path / STATE, FORMAT) or is_sharded(path)):
        return
    mine = sorted(_read_state(path)[1].items())[job.rank :: job.num_processes]
    wrong = ((_wrong(path / name, expected), name) for name, expected in mine)
    for what, name in job.gather(next((found for found in wrong if found[0]), ("", ""))):
        if what:
            raise CorruptFileError(what, where=str(path / name))


def _wrong(file: Path, expected: str) -> str:
    """What is wrong with a file; empty if nothing is."""
    if not file.is_file():
        return "the checkpoint lacks a file"
    return "" if sha256_file(file) == expected else f"the file does not match its hash in {STATE}"


def _read_state(path: Path) -> tuple[RunState, dict[str, str]]:
    """The state, and the hashes of the files."""
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
        hashes = {Path(name).name: _as(str, value) for name, value in dict(values["files"]).items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFileError(f"not the state of a checkpoint ({error})", where=str(file)) from error
    return state, hashes


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
    *(("runtime", key) for key in ("threads", "memory_budget_bytes", "recompute")),
    *(("runtime", key) for key in ("checkpoint_every", "checkpoint_format", "keep_checkpoints")),
    *(("parallel", f.name) for f in fields(ParallelSection)),
}
"""Keys that a resumed run may change: none of them changes a gradient beyond the order of its sums."""


def _remove(path: Path) -> None:
    """Rename first: an interrupted removal must not leave half a checkpoint under a valid name."""
    hidden = path.with_name(f".{path.name}.old")
    os.rename(path, hidden)
    shutil.rmtree(hidden)
