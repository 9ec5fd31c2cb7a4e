"""The weights of a run's checkpoint as a Hugging Face folder, in one process, whatever layout wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harts_core.errors import ConfigError
from harts_core.exec.checkpoint import check_files, read_state
from harts_core.exec.load_model import check_torch
from harts_core.exec.weights.hf_checkpoint import stream_hf_checkpoint
from harts_core.exec.weights.load import (
    StoredModel,
    check_tensors,
    model_shapes,
    read_stored_model,
    refuse_run_folder,
)
from harts_core.files import atomic_directory, check_parent, check_replaceable, refuse_inputs
from harts_core.progress import Progress, no_progress

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """What was written.

    Attributes:
        output: the folder.
        checkpoint: the folder that was read.
        step: optimizer steps that the run had taken.
        dtype: of the run.
        tensors: entries of the model's state; the routed experts of a layer may be one.
        bytes: of the weights.
    """

    output: str
    checkpoint: str
    step: int
    dtype: str
    tensors: int
    bytes: int


def export_weights(checkpoint: Path, out: Path, progress: Progress = no_progress) -> ExportedWeights:
    """Write config.json and safetensors files, one tensor in memory at a time.

    The files are those that the run would have written with ``checkpoint_format = "whole"``.

    Args:
        checkpoint: of a run, in either format.
        out: a new or empty folder.
        progress: called with the phase ``tensors``.

    Raises:
        ConfigError: the output is the input, or lies in it.
        DataError: not a checkpoint of a run, a file is missing, or the output cannot be written.
        CorruptFileError: a file is damaged.
        MissingBackendError: torch or safetensors is not installed.
    """
    refuse_run_folder(checkpoint)
    state, stored = read_state(checkpoint), read_stored_model(checkpoint)
    _check_output(out, checkpoint)
    check_torch("exporting weights")
    from harts_core.exec.parallel.job import ALONE

    check_files(checkpoint, ALONE)
    kept = sorted(check_tensors(stored))
    names = [*model_shapes(stored.config, fused_experts=stored.fused_experts), *kept]
    forms = {name: (stored.tensors[name].dtype, stored.tensors[name].shape) for name in names}
    with atomic_directory(out) as folder:
        tensors = _tensors(stored, names, progress)
        stream_hf_checkpoint(folder, forms, tensors, stored.config, dtype=state.dtype)
    return ExportedWeights(
        output=str(out),
        checkpoint=str(checkpoint),
        step=state.step,
        dtype=state.dtype,
        tensors=len(names),
        bytes=sum(stored.tensors[name].num_bytes for name in names),
    )


def _check_output(out: Path, checkpoint: Path) -> None:
    """Before anything is read, which can take long."""
    refuse_inputs(out, [checkpoint])
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(checkpoint)):
        raise ConfigError(
            "the output lies in the checkpoint, and would be deleted with it",
            where=str(out),
            hint="name another output",
        )
    check_parent(out)
    if out.exists():
        check_replaceable(out, None)


def _tensors(stored: StoredModel, names: list[str], progress: Progress) -> Iterator[tuple[str, Tensor]]:
    reader = stored.reader()
    for done, name in enumerate(names):
        progress("tensors", done, len(names))
        yield name, reader.read(name)
    progress("tensors", len(names), len(names))
