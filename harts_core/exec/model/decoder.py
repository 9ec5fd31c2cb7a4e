"""The whole model over one unit's compact tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harts_core.errors import ConfigError, ExecError
from harts_core.exec.kda import KdaBackend, get_kda_backend, state_dtype
from harts_core.exec.layout import DeviceLayout, UnitLayout
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model.init import init_weights
from harts_core.exec.model.interface import ExportRows, LayerImports, LayerInterface, UnitInterface
from harts_core.exec.model.kda_layer import KdaAttention
from harts_core.exec.model.mla_layer import MlaAttention, Rotation
from harts_core.exec.model.mlp import SwiGLU
from harts_core.exec.model.moe import Routing
from harts_core.exec.model.spec import LOCAL_SPEC, ModelSpec
from harts_core.plan.recompute import Recompute, recomputes_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutput:
    """A unit's forward.

    Attributes:
        hidden: [C, D], after the final norm; of a pipeline stage other than the last, the residual stream
            that the next stage goes on with.
        routing: one entry per layer with experts, in order.
        interface: what was exported, if anything was asked for.
    """

    hidden: Tensor
    routing: tuple[Routing, ...]
    interface: UnitInterface | None


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, spec: ModelSpec, backend: KdaBackend
    ) -> None:
        super().__init__()
        hidden, state = config.hidden_size, state_dtype(dtype)
        self.enter = spec.enter
        self.input_layernorm = spec.norm(hidden, config.rms_norm_eps, state)
        self.attention: KdaAttention | MlaAttention
        if config.is_mla(index):
            self.attention = MlaAttention(config, dtype, spec)
        else:
            self.attention = KdaAttention(config, dtype, spec, backend)
        self.post_attention_layernorm = spec.norm(hidden, config.rms_norm_eps, state)
        self.has_experts = config.is_moe(index)
        if self.has_experts:
            self.mlp = spec.moe(config, dtype, spec)
        else:
            self.mlp = SwiGLU(hidden, config.intermediate_size, dtype, spec)
        spec.mark_rows(self.input_layernorm.weight)
        spec.mark_rows(self.post_attention_layernorm.weight)

    def forward(
        self,
        x_CD: Tensor,
        layout: DeviceLayout,
        rotation: Rotation,
        imports: LayerInterface | None,
        export: ExportRows | None,
    ) -> tuple[Tensor, Routing | None, LayerInterface | None]:
        """[C, D] → [C, D], the routing of an expert layer, and the exported rows.

        The residual stream and the routing are of this rank's rows; attention sees those of the whole unit.
        """
        normed = self.enter(self.input_layernorm(x_CD))[: layout.layout.num_rows]
        if isinstance(self.attention, MlaAttention):
            out, exported = self.attention(normed, layout, rotation, imports, export)
        else:
            out, exported = self.attention(normed, layout, imports, export)
        x_CD = x_CD + out
        normed = self.post_attention_layernorm(x_CD)
        if self.has_experts:
            out, routing = self.mlp(normed)
            return x_CD + out, routing, exported
        return x_CD + self.mlp(normed), None, exported


class Layers(nn.Module):
    """A run of the model's layers, under their numbers in the whole model.

    Args:
        layers: number to layer, in order.
    """

    def __init__(self, layers: dict[int, DecoderLayer]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[DecoderLayer]:
        return (layer for layer in self._modules.values() if isinstance(layer, DecoderLayer))

    def __getitem__(self, position: int) -> DecoderLayer:
        """The layer at a position of the run."""
        return list(self)[position]


class Decoder(nn.Module):
    """Embedding, layers and final norm, as far as the stage has them: ``model.`` of the tensor names."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, spec: ModelSpec, backend: KdaBackend) -> None:
        super().__init__()
        if spec.stage.is_first:
            self.word_embeddings = spec.embedding(config.vocab_size, config.hidden_size, dtype)
        numbers = spec.stage.layers(config.num_hidden_layers)
        self.layers = Layers({i: DecoderLayer(config, i, dtype, spec, backend) for i in numbers})
        if spec.stage.is_last:
            self.norm = spec.norm(config.hidden_size, config.rms_norm_eps, state_dtype(dtype))
            spec.mark_rows(self.norm.weight)


class HybridModel(nn.Module):
    """The hybrid KDA and MLA decoder over compact tokens.

    Parameter names are those of the published checkpoints, except that the routed experts of a layer are
    fused: ``mlp.experts.{gate,up,down}_proj`` [E, out, in]. Norm, convolution and router weights, A_log,
    dt_bias and the buffer ``mlp.gate.expert_bias`` are float32 for bfloat16; all is float64 for float64.

    Args:
        config: the model's shape.
        dtype: float32, bfloat16 or float64.
        kda_backend: name of the linear-attention backend.
        spec: the replaceable parts.
        seed: of the initial weights; each tensor depends on the seed and its name only. None: the weights
            are left as they were allocated (to be loaded, or never to be used).

    Raises:
        ConfigError: another dtype, or an unknown backend.
        MissingBackendError: the backend cannot run here.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        kda_backend: str = "torch",
        spec: ModelSpec = LOCAL_SPEC,
        seed: int | None,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise ConfigError(
                f"The model cannot run in {dtype}; use float32, bfloat16 or float64.", where="dtype"
            )
        self.config, self.dtype, self.spec = config, dtype, spec
        self.model = Decoder(config, dtype, spec, get_kda_backend(kda_backend))
        if spec.stage.is_last:
            self.lm_head = spec.lm_head(config.hidden_size, config.vocab_size, dtype)
        if seed is not None:
            init_weights(self, spec, std=config.initializer_range, seed=seed)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def expert_biases(self) -> list[Tensor]:
        """[E] in the state dtype: the routing bias of every layer with experts, in order."""
        layers = (layer for layer in self.model.layers if layer.has_experts)
        return [layer.mlp.get_buffer("gate.expert_bias") for layer in layers]

    @property
    def routed_shape(self) -> tuple[int, int]:
        """Layers with experts, and routed experts of a layer."""
        return len(self.expert_biases), self.config.num_experts

    def forward(
        self,
        layout: UnitLayout | DeviceLayout,
        imports: LayerImports | None = None,
        *,
        recompute: Recompute = "none",
        export: ExportRows | None = None,
        received: Tensor | None = None,
    ) -> UnitOutput:
        """Run the layers over the unit's own rows.

        Args:
            layout: the unit's layout.
            imports: the rows and states of other units that the layout names, in its order; None only
                where it names none.
            recompute: with layers, only each layer's input is kept and the layer runs again in the backward
                pass. (Whole units run again where their executor says so.)
            export: rows and states to return for later units.
            received: the residual stream from the stage before, where there is one.

        Raises:
            ExecError: the layout needs imports and got none.
        """
        device = layout.to(self.device)
        if imports is None and device.layout.imported.is_needed:
            raise ExecError(
                "The unit reads tokens of other units, but nothing was imported.",
                where=f"unit {device.layout.unit}",
                hint="Run its producer first and pass its interface.",
            )
        x = self.model.word_embeddings(device.tokens) if received is None else received
        config = self.config
        rotation = Rotation(
            device.positions, config.qk_rope_head_dim, config.rope_theta, state_dtype(self.dtype)
        )
        routing: list[Routing] = []
        exported: list[LayerInterface] = []
        for i in range(len(self.model.layers)):
            arguments = (i, x, device, rotation, imports, export)
            if recomputes_layers(recompute):
                x, routed, part = checkpoint(
                    self._run_layer, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x, routed, part = self._run_layer(*arguments)
            if routed is not None:
                routing.append(routed)
            if part is not None:
                exported.append(part)
        hidden = x
        if self.spec.stage.is_last:
            hidden = self.spec.enter(self.model.norm(x))[: device.layout.num_rows]
        interface = None
        if export is not None:
            if self.spec.stage.is_last:
                rows = hidden.index_select(0, export.hidden)
            else:  # only the head reads them
                rows = hidden.new_empty(len(export.hidden), 0)
            interface = UnitInterface(layers=tuple(exported), hidden=rows)
        return UnitOutput(hidden=hidden, routing=tuple(routing), interface=interface)

    def _run_layer(
        self,
        index: int,
        x_CD: Tensor,
        device: DeviceLayout,
        rotation: Rotation,
        imports: LayerImports | None,
        export: ExportRows | None,
    ) -> tuple[Tensor, Routing | None, LayerInterface | None]:
        """One layer on its imports, which are gathered here and so not kept where the layer is recomputed."""
        imported = None if imports is None else imports.layer(index)
        result: tuple[Tensor, Routing | None, LayerInterface | None]
        result = self.model.layers[index](x_CD, device, rotation, imported, export)
        return result
