"""Seeded initial weights: each tensor depends on the seed and its own name only, not on the others."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn


@torch.no_grad()
def init_weights(model: nn.Module, *, std: float, seed: int) -> None:
    """Fill every parameter in place.

    Norm weights are one; A_log is the log of U(1, 16); dt_bias is the inverse softplus of a log-uniform time
    step in [1e-3, 1e-1]; all others are normal with deviation ``std``. Values are drawn in float32 (so that
    all dtypes start alike) and then cast.
    """
    for name, parameter in model.named_parameters():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        parameter.copy_(_draw(name, parameter.shape, std, generator))


def _draw(name: str, shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.ones(shape)
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator).mul_(15.0).add_(1.0).log_()
    if name.endswith("dt_bias"):
        low, high = math.log(1e-3), math.log(1e-1)
        step = torch.rand(shape, generator=generator).mul_(high - low).add_(low).exp_()
        return step + torch.log(-torch.expm1(-step))
    return torch.randn(shape, generator=generator).mul_(std)
