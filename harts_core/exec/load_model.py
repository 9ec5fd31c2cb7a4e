"""From a configuration to a model that can run here: the libraries, the device, the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harts_core.errors import MissingBackendError
from harts_core.exec.config import RuntimeSection
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.weights.load import StoredModel

if TYPE_CHECKING:
    from torch import Tensor

    from harts_core.exec.model.decoder import HybridModel
    from harts_core.exec.model.spec import ModelSpec

INSTALL = "pip install 'harts[train]'"


def check_backend(runtime: RuntimeSection, purpose: str) -> None:
    """Import torch and set its threads and seed.

    Args:
        runtime: the ``[runtime]`` table.
        purpose: what needs torch, for the message.

    Raises:
        MissingBackendError: torch or safetensors is not installed, or the device is absent.
    """
    check_torch(purpose)
    import torch

    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise MissingBackendError(
            "no CUDA device is available", where="[runtime] device", hint='set device = "cpu"'
        )
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    torch.manual_seed(runtime.seed)


def check_torch(purpose: str) -> None:
    """Import torch and safetensors.

    Args:
        purpose: what needs them, for the message.

    Raises:
        MissingBackendError: one of them is not installed.
    """
    try:
        import safetensors
        import torch
    except ImportError as error:
        raise MissingBackendError(
            f"{purpose} needs {error.name}, which is not installed", hint=INSTALL
        ) from error
    del safetensors, torch


def load_model(
    config: ModelConfig,
    weights: StoredModel | None,
    runtime: RuntimeSection,
    spec: ModelSpec | None = None,
    *,
    training: bool = False,
    num_processes: int = 1,
) -> tuple[HybridModel, dict[str, Tensor]]:
    """Build a model on its device: with a checkpoint's weights, or freshly initialised from the seed.

    Args:
        config: the model's shape.
        weights: the checkpoint to load, if any.
        runtime: the ``[runtime]`` table.
        spec: the parts of the model; None: those of a single process.
        training: whether gradients and an optimizer's state will be held, too.
        num_processes: that share the model.

    Returns:
        The model, and the checkpoint's tensors that it does not use.

    Raises:
        DataError: the weights do not fit the model.
        MissingBackendError: the linear-attention backend cannot run here.
        ExecError: more weights than there is memory.
    """
    import torch

    from harts_core.exec.model.decoder import HybridModel
    from harts_core.exec.model.spec import LOCAL_SPEC
    from harts_core.exec.model_size import check_model_fits
    from harts_core.exec.weights.load import load_weights

    check_model_fits(config, runtime, training=training, num_processes=num_processes)
    model = HybridModel(
        config,
        dtype=getattr(torch, runtime.dtype),
        kda_backend=runtime.backend,
        spec=LOCAL_SPEC if spec is None else spec,
        seed=runtime.seed if weights is None else None,
    )
    unused = {} if weights is None else load_weights(model, weights)
    model.to(runtime.device)
    return model, unused


def at_file(error_where: str | None, file: Path) -> str:
    """The place of an error within a file."""
    return str(file) if error_where is None else f"{file}, {error_where}"
