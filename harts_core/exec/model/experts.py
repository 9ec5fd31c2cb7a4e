"""Routed experts on one rank: rows grouped by expert, one grouped matrix product per projection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts_core.exec.model.config import ModelConfig


class Experts(nn.Module):
    """E SwiGLU experts, held fused: ``gate_proj`` and ``up_proj`` [E, F, D], ``down_proj`` [E, D, F].

    Args:
        config: the model's.
        dtype: of the weights.
        num_experts: E, experts of this rank; None: all.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_experts: int | None = None) -> None:
        super().__init__()
        E = config.num_experts if num_experts is None else num_experts
        D, width = config.hidden_size, config.moe_intermediate_size
        self.num_routed = config.num_experts
        self.gate_proj = nn.Parameter(torch.empty(E, width, D, dtype=dtype))
        self.up_proj = nn.Parameter(torch.empty(E, width, D, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(E, D, width, dtype=dtype))

    def forward(self, x_CD: Tensor, weights_Ck: Tensor, experts_Ck: Tensor) -> Tensor:
        """Σ over a token's experts of weight · expert(x).

        Args:
            x_CD: tokens, any number including none.
            weights_Ck: routing weights, in the state dtype.
            experts_Ck: int64, expert ids, distinct in a row. Experts without tokens are fine.

        Returns:
            [C, D] in x's dtype; the weighted sum is taken in the weights' dtype, in the order of the columns.
        """
        C, k = experts_Ck.shape
        flat = experts_Ck.reshape(-1)
        order = torch.argsort(flat, stable=True)
        place = torch.empty_like(order).index_copy_(0, order, torch.arange(C * k, device=order.device))
        counts = torch.bincount(flat, minlength=self.num_routed)
        x = _Dispatch.apply(x_CD, order // k, place, k)  # type: ignore[no-untyped-call]
        y_CkD = self.apply_experts(x, counts).index_select(0, place).view(C, k, x_CD.shape[1])
        return (y_CkD * weights_Ck.unsqueeze(-1)).sum(1).to(x_CD.dtype)

    def apply_experts(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """[R, D] → [R, D], each row through its expert.

        Args:
            x_RD: rows grouped by expert.
            counts_E: int64, rows of each of this rank's experts.
        """
        ends = counts_E.cumsum(0)
        h = F.silu(_grouped_linear(x_RD, self.gate_proj, ends)) * _grouped_linear(x_RD, self.up_proj, ends)
        return _grouped_linear(h, self.down_proj, ends)


def _grouped_linear(x: Tensor, weight_Eoi: Tensor, ends_E: Tensor) -> Tensor:
    """Rows [ends[e − 1], ends[e]) of x times the transpose of weight[e].

    Args:
        x: [R, in], rows grouped by expert.
        weight_Eoi: [E, out, in].
        ends_E: int64 [E], cumulative row counts; ends[E − 1] = R.
    """
    if len(x) and _has_grouped_product(x.dtype, weight_Eoi.shape[1:]):
        return F.grouped_mm(x, weight_Eoi.transpose(1, 2), offs=ends_E.to(torch.int32))
    sizes: list[int] = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()
    return torch.cat([F.linear(part, w) for part, w in zip(torch.split(x, sizes), weight_Eoi, strict=True)])


def _has_grouped_product(dtype: torch.dtype, widths: tuple[int, ...]) -> bool:
    """torch's grouped product takes float32 and bfloat16 rows of whole 16-byte units; others go in a loop."""
    return dtype != torch.float64 and all(n * dtype.itemsize % 16 == 0 for n in widths)


class _Dispatch(torch.autograd.Function):
    """x.index_select(0, source); backward sums each token's k copies in a fixed order, without atomics."""

    @staticmethod
    def forward(ctx: Any, x_CD: Tensor, source: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return x_CD.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        grad = grads[0].index_select(0, place)
        return grad.view(len(grad) // ctx.k, ctx.k, grad.shape[-1]).sum(1), None, None, None
