"""The short causal convolution over the true ancestors of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts_core.exec.model.config import CONV_WIDTH


class ShortConv(nn.Module):
    """Depthwise convolution of width 4 and SiLU, in the weight's dtype; ``weight`` [channels, 1, 4]."""

    def __init__(self, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, CONV_WIDTH, dtype=dtype))

    def forward(self, x: Tensor, ancestors: Sequence[Tensor]) -> Tensor:
        """y_c = SiLU(w₃ x_c + Σ_j w_j x_{ancestor j of c}).

        Args:
            x: [C + R, channels], own rows and then imported ones.
            ancestors: three int64 [C] tensors, the farthest ancestor first; C + R where there is none.

        Returns:
            [C, channels] in the weight's dtype.
        """
        out: Tensor = _Convolve.apply(x.to(self.weight.dtype), self.weight, *ancestors)  # type: ignore[no-untyped-call]
        return F.silu(out)


class _Convolve(torch.autograd.Function):
    """The convolution without SiLU; keeps only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *ancestors: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 1))
        taps = weight[:, 0].t().contiguous()
        out = padded[: len(ancestors[0])] * taps[-1]
        for index, tap in zip(ancestors, taps, strict=False):
            out.addcmul_(padded.index_select(0, index), tap)
        ctx.save_for_backward(padded, taps, *ancestors)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        padded, taps, *ancestors = ctx.saved_tensors
        grad = grads[0]
        dx = torch.zeros_like(padded)
        dx[: len(grad)] = grad * taps[-1]
        dtaps = torch.empty_like(taps)
        dtaps[-1] = (grad * padded[: len(grad)]).sum(0)
        for j, index in enumerate(ancestors):
            dx.index_add_(0, index, grad * taps[j])
            dtaps[j] = (grad * padded.index_select(0, index)).sum(0)
        return dx[:-1], dtaps.t().unsqueeze(1), *(None for _ in ancestors)
