"""RMS norms, computed in the state dtype (float32; float64 in a float64 run)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harts_core.exec.kda import state_dtype


class RMSNorm(nn.Module):
    """x · (mean(x²) + eps)^-½ · weight over the last dimension, in the weight's dtype; returned in x's."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows of any leading shape."""
        return (_normalised(x.to(self.weight.dtype), self.eps) * self.weight).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """The KDA output: RMSNorm per head times the sigmoid of a gate; the weight [V] is shared by the heads."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, o_CHV: Tensor, gate_CHV: Tensor) -> Tensor:
        """Normalise and gate; the result has the dtype of ``o_CHV``."""
        dtype = self.weight.dtype
        normed = _normalised(o_CHV.to(dtype), self.eps) * self.weight
        return (normed * torch.sigmoid(gate_CHV.to(dtype))).to(o_CHV.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def unit_length(x_CHK: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σ x² + eps) per head, in the state dtype."""
    x_CHK = x_CHK.to(state_dtype(x_CHK.dtype))
    return x_CHK * torch.rsqrt(x_CHK.square().sum(-1, keepdim=True) + eps)
