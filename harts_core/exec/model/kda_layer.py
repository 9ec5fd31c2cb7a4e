"""The linear-attention layer: projections, convolution and gates once per compact token, then the rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts_core.exec.kda import KdaBackend, state_dtype
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model.interface import ExportRows, KdaInterface
from harts_core.exec.model.kda_rounds import KdaInputs, run_rounds
from harts_core.exec.model.norm import GatedRMSNorm, unit_length
from harts_core.exec.model.short_conv import ShortConv

if TYPE_CHECKING:
    from harts_core.exec.layout import DeviceLayout
    from harts_core.exec.model.spec import ModelSpec


class KdaAttention(nn.Module):
    """Kimi delta attention with output gate (MODEL.md, KDA layer). H below are the heads of this rank."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, spec: ModelSpec, backend: KdaBackend) -> None:
        super().__init__()
        hidden, K, state = config.hidden_size, config.head_dim, state_dtype(dtype)
        self.head_dim, self.backend = K, backend
        self.lower_bound = config.kda_lower_bound if config.kda_safe_gate else None
        heads = spec.local_heads(config.num_attention_heads)
        width = config.num_attention_heads * K
        self.q_proj = spec.column_linear(hidden, width, dtype)
        self.k_proj = spec.column_linear(hidden, width, dtype)
        self.v_proj = spec.column_linear(hidden, width, dtype)
        self.f_proj = spec.column_linear(hidden, width, dtype)
        self.b_proj = spec.column_linear(hidden, config.num_attention_heads, dtype)
        self.g_proj = spec.column_linear(hidden, width, dtype)
        self.q_conv1d = ShortConv(heads * K, state)
        self.k_conv1d = ShortConv(heads * K, state)
        self.v_conv1d = ShortConv(heads * K, state)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=state))
        self.dt_bias = nn.Parameter(torch.empty(heads * K, dtype=state))
        self.o_norm = GatedRMSNorm(K, config.rms_norm_eps, state)
        convolutions = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
        for parameter in (*convolutions, self.A_log, self.dt_bias):
            spec.mark_split(parameter)
        spec.mark_shared(self.o_norm.weight)
        self.dense = spec.row_linear(width, hidden, dtype)

    def forward(
        self,
        x_CD: Tensor,
        layout: DeviceLayout,
        imports: KdaInterface | None = None,
        export: ExportRows | None = None,
    ) -> tuple[Tensor, KdaInterface | None]:
        """[C, D] → [C, D], and the exported rows if asked for."""
        conv_inputs = (self.q_proj(x_CD), self.k_proj(x_CD), self.v_proj(x_CD))
        inputs = self.recurrence_inputs(x_CD, conv_inputs, layout, imports)
        o_CHV, states = run_rounds(self.backend, inputs, layout, imports, gate_lower_bound=self.lower_bound)
        gate_CHV = self.g_proj(x_CD).view(o_CHV.shape)
        out = self.dense(self.o_norm(o_CHV, gate_CHV).flatten(1))
        if export is None:
            return out, None
        q, k, v = (pre.index_select(0, export.conv) for pre in conv_inputs)
        rows = (inputs.k, inputs.v, inputs.g, inputs.beta)
        k_R, v_R, g_R, beta_R = (row.index_select(0, export.replay) for row in rows)
        return out, KdaInterface(
            conv=(q, k, v), replay=(k_R, v_R, g_R, beta_R), states=states.index_select(0, export.states)
        )

    def recurrence_inputs(
        self,
        x_CD: Tensor,
        conv_inputs: tuple[Tensor, Tensor, Tensor],
        layout: DeviceLayout,
        imports: KdaInterface | None = None,
    ) -> KdaInputs:
        """Convolution, normalisation and gates, once per compact token.

        Args:
            x_CD: the layer's normed input.
            conv_inputs: W_q x, W_k x, W_v x, [C, H·K] each.
            layout: the unit's layout.
            imports: rows of other units.
        """
        C, K, dtype = len(x_CD), self.head_dim, x_CD.dtype
        heads = len(self.A_log)
        if imports is not None:
            q, k, v = (torch.cat(pair) for pair in zip(conv_inputs, imports.conv, strict=True))
            conv_inputs = (q, k, v)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        q_CHK, k_CHK, v_CHV = (
            conv(pre, layout.conv_ancestors).view(C, heads, K)
            for conv, pre in zip(convs, conv_inputs, strict=True)
        )
        return KdaInputs(
            q=(unit_length(q_CHK) * K**-0.5).to(dtype),
            k=unit_length(k_CHK).to(dtype),
            v=v_CHV.to(dtype),
            g=self._log_gate(self.f_proj(x_CD).view(C, heads, K)),
            beta=torch.sigmoid(self.b_proj(x_CD).to(self.A_log.dtype)),
        )

    def _log_gate(self, f_CHK: Tensor) -> Tensor:
        """The log of the decay per key channel, ≤ 0, in the state dtype."""
        f_CHK = f_CHK.to(self.dt_bias.dtype) + self.dt_bias.view(f_CHK.shape[1:])
        rate_H1 = self.A_log.exp().unsqueeze(-1)
        if self.lower_bound is not None:
            return self.lower_bound * torch.sigmoid(rate_H1 * f_CHK)
        return -rate_H1 * F.softplus(f_CHK)
