"""The full-attention layer: multi-head latent attention with rotary positions and a head-wise output gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from harts_core.exec.kda import state_dtype
from harts_core.exec.model.attention import forest_attention
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model.interface import ExportRows, MlaInterface

if TYPE_CHECKING:
    from harts_core.exec.layout import DeviceLayout
    from harts_core.exec.model.spec import ModelSpec

LATENT_EPS = 1e-6
"""The latent norms' eps; the published model does not configure it."""


class MlaAttention(nn.Module):
    """Latent attention (MODEL.md, MLA layer). Heads are those of this rank."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, spec: ModelSpec) -> None:
        super().__init__()
        hidden, heads, state = config.hidden_size, config.num_attention_heads, state_dtype(dtype)
        self.heads = spec.local_heads(heads)
        self.nope, self.rope, self.value = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        self.latent = config.kv_lora_rank
        self.q_proj: nn.Module | None = None
        if config.q_lora_rank is None:
            self.q_proj = spec.column_linear(hidden, heads * config.qk_head_dim, dtype)
        else:
            self.q_a_proj = spec.replicated_linear(hidden, config.q_lora_rank, dtype)
            self.q_a_layernorm = spec.norm(config.q_lora_rank, LATENT_EPS, state)
            self.q_b_proj = spec.column_linear(config.q_lora_rank, heads * config.qk_head_dim, dtype)
        self.kv_a_proj_with_mqa = spec.replicated_linear(hidden, self.latent + self.rope, dtype)
        self.kv_a_layernorm = spec.norm(self.latent, LATENT_EPS, state)
        self.kv_b_proj = spec.column_linear(self.latent, heads * (self.nope + self.value), dtype)
        shared = [self.kv_a_proj_with_mqa, self.kv_a_layernorm]
        if self.q_proj is None:
            shared += [self.q_a_proj, self.q_a_layernorm]
        for module in shared:
            spec.mark_shared(module.weight)
        self.g_proj = spec.column_linear(hidden, heads, dtype)
        self.dense = spec.row_linear(heads * self.value, hidden, dtype)

    def forward(
        self,
        x_CD: Tensor,
        layout: DeviceLayout,
        rotation: Rotation,
        imports: MlaInterface | None = None,
        export: ExportRows | None = None,
    ) -> tuple[Tensor, MlaInterface | None]:
        """[C, D] → [C, D], and the exported keys and values if asked for."""
        q_CHK = self._queries(x_CD, rotation)
        k_CHK, v_CHV = self._keys_values(x_CD, rotation)
        exported = None
        if export is not None:
            exported = MlaInterface(
                keys=k_CHK.index_select(0, export.keys), values=v_CHV.index_select(0, export.keys)
            )
        if imports is not None:
            k_CHK = torch.cat([k_CHK, imports.keys])
            v_CHV = torch.cat([v_CHV, imports.values])
        scale = (self.nope + self.rope) ** -0.5
        o_CHV = forest_attention(q_CHK, k_CHK, v_CHV, layout.layout.attention, scale)
        gate_CH = torch.sigmoid(self.g_proj(x_CD).to(state_dtype(x_CD.dtype))).to(x_CD.dtype)
        return self.dense((o_CHV * gate_CH.unsqueeze(-1)).flatten(1)), exported

    def _queries(self, x_CD: Tensor, rotation: Rotation) -> Tensor:
        if self.q_proj is None:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_CD)))
        else:
            q = self.q_proj(x_CD)
        q_nope, q_rope = q.view(len(x_CD), self.heads, self.nope + self.rope).split(
            [self.nope, self.rope], -1
        )
        return torch.cat([q_nope, rotation(q_rope)], -1)

    def _keys_values(self, x_CD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        latent, k_rope = self.kv_a_proj_with_mqa(x_CD).split([self.latent, self.rope], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent))
        expanded = expanded.view(len(x_CD), self.heads, self.nope + self.value)
        k_nope, v_CHV = expanded.split([self.nope, self.value], -1)
        k_rope = rotation(k_rope.unsqueeze(1)).expand(-1, self.heads, -1)
        return torch.cat([k_nope, k_rope], -1), v_CHV


class Rotation:
    """Interleaved rotary embedding at given positions; pairs (2i, 2i + 1) turn by position · θ^(−2i / width).

    The turned pairs come out as two halves instead of interleaved; queries and keys alike, so that their
    products do not change.

    Args:
        positions_C: int64, positions in the trajectory.
        width: width of the rotated part.
        theta: base of the frequencies.
        dtype: of the angles: the state dtype.
    """

    def __init__(self, positions_C: Tensor, width: int, theta: float, dtype: torch.dtype) -> None:
        exponent = torch.arange(0, width, 2, dtype=dtype, device=positions_C.device) / width
        angle = positions_C.to(dtype).unsqueeze(-1) * (1.0 / theta**exponent)
        self.cos, self.sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)

    def __call__(self, x_CHR: Tensor) -> Tensor:
        """Rotate [C, H, width]; in the state dtype, returned in x's."""
        even, odd = x_CHR.to(self.cos.dtype).view(*x_CHR.shape[:-1], self.cos.shape[-1], 2).unbind(-1)
        turned = [even * self.cos - odd * self.sin, odd * self.cos + even * self.sin]
        return torch.cat(turned, -1).to(x_CHR.dtype)
