"""Seeded initial weights: each tensor depends on the seed and its own name only, not on the others."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from harts_core.exec.model.spec import ModelSpec


@torch.no_grad()
def init_weights(model: nn.Module, spec: ModelSpec, *, std: float, seed: int) -> None:
    """Fill every parameter in place.

    Norm weights are one; A_log is the log of U(1, 16); dt_bias is the inverse softplus of a log-uniform time
    step in [1e-3, 1e-1]; all others are normal with deviation ``std``. Values are drawn in float32 (so that
    all dtypes start alike) and then cast. A rank that holds a part of a tensor draws the whole one.
    """
    for name, parameter in model.named_parameters():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        shard = spec.shard_of(parameter)
        whole = _draw(name, shard.full_shape(parameter), std, generator)
        parameter.copy_(shard.own_part(whole))


def _draw(name: str, shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.ones(shape)
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator).mul_(15.0).add_(1.0).log_()
    if name.endswith("dt_bias"):
        low, high = math.log(1e-3), math.log(1e-1)
        step = torch.rand(shape, generator=generator).mul_(high - low).add_(low).exp_()
        return step + torch.log(-torch.expm1(-step))
    return torch.randn(shape, generator=generator).mul_(std)
