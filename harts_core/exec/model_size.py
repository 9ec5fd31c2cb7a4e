"""Whether a model can be held in memory at all, estimated before anything is allocated."""

from __future__ import annotations

import os

from harts_core.errors import ExecError
from harts_core.exec.config import RuntimeSection
from harts_core.exec.flops import kda_weights, mla_weights
from harts_core.exec.model.config import ModelConfig

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
UPDATE_BYTES = {"float32": 12, "bfloat16": 16, "float64": 24}
"""Of a weight in training, besides itself: gradient, two moments and, below float32, a float32 master."""


def num_weights(config: ModelConfig) -> int:
    """Entries of all matrices of a model: embedding, head, attention, routers, experts. Vectors are left out.

    Takes no time for any number of layers.
    """
    layers, hidden = config.num_hidden_layers, config.hidden_size
    num_mla = layers // config.layer_group_size
    num_dense = min(layers, config.first_k_dense_replace)
    width = 3 * (config.num_experts + config.num_shared_experts) * config.moe_intermediate_size
    return (
        2 * config.vocab_size * hidden
        + (layers - num_mla) * kda_weights(config)
        + num_mla * mla_weights(config)
        + num_dense * 3 * hidden * config.intermediate_size
        + (layers - num_dense) * hidden * (config.num_experts + width)
    )


def check_model_fits(
    config: ModelConfig, runtime: RuntimeSection, *, training: bool, num_processes: int = 1
) -> None:
    """Refuse a model that the machine or the device cannot hold. Activations are not counted.

    Args:
        config: the model's shape.
        runtime: its dtype and device.
        training: whether gradients and the optimizer's state are held, too.
        num_processes: that share the model, each with an even part at best.

    Raises:
        ExecError: the estimate exceeds all memory that there is.
    """
    weights = num_weights(config) // num_processes
    per_weight = WEIGHT_BYTES[runtime.dtype] + (UPDATE_BYTES[runtime.dtype] if training else 0)
    places = {"cpu": weights * WEIGHT_BYTES[runtime.dtype]}  # where the model is built
    places[runtime.device] = weights * per_weight
    for device, needed in places.items():
        available = _memory_bytes(device)
        if needed > available:
            state = ", gradients and optimizer state" if training and device == runtime.device else ""
            raise ExecError(
                f"the model does not fit: {num_weights(config):,} weights{state} need {_gib(needed)}, "
                f"the {device} has {_gib(available)}",
                where="[model]",
                hint="choose a smaller model, or more processes ([parallel])",
            )


def _memory_bytes(device: str) -> int:
    if device == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
