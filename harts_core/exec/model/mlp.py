"""The dense feed-forward layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from harts_core.exec.model.spec import ModelSpec


class SwiGLU(nn.Module):
    """W_down(SiLU(W_gate x) ⊙ W_up x)."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype, spec: ModelSpec) -> None:
        super().__init__()
        self.enter = spec.enter
        self.gate_proj = spec.column_linear(hidden, intermediate, dtype)
        self.up_proj = spec.column_linear(hidden, intermediate, dtype)
        self.down_proj = spec.row_linear(intermediate, hidden, dtype)

    def forward(self, x_CD: Tensor) -> Tensor:
        """[C, D] → [C, D]."""
        x_CD = self.enter(x_CD)
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_CD)) * self.up_proj(x_CD))
        return out
