"""The mixture of experts over expert-parallel ranks: Megatron-core's MoELayer with the model's own parts.

Megatron-core contributes the layer's course and its token dispatchers, which bring rows to the ranks of their
experts and back; the router, the grouped experts and the shared expert are those of one process
(``harts_core.exec.model``) and come in through the layer's submodule specs.

Routing weights are multiplied with the experts' outputs and summed in the state dtype, as in one process.
Where that happens follows from what travels: the all-to-all dispatcher brings every single output row home,
in the model's dtype, and it is weighted there; the others sum a token's rows on the way, so that their rows
are weighted before.

Shape legend: C rows of this rank, R rows that its experts get, E routed experts, D hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from harts_core.exec.config import ParallelSection, TokenDispatcher
from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model.experts import Experts
from harts_core.exec.model.mlp import SwiGLU
from harts_core.exec.model.moe import Router, Routing, shared_width
from harts_core.exec.model.spec import ModelSpec

_REMEMBERED = ("probs", "local_probs", "routing_map", "local_map", "reversed_local_input_permutation_mapping")
"""Tensors that Megatron-core's dispatchers keep as attributes."""


class ExpertParallelMoE(MoELayer):  # type: ignore[misc]
    """``harts_core.exec.model.moe.MoE`` with the experts on several ranks; the same tensor names.

    Every rank of the expert-parallel group calls it together, forward and backward, also with no rows.

    Args:
        config: the model's.
        dtype: of the weights.
        spec: the parts that are split over the tensor-parallel ranks.
        parallel: the degrees and the token dispatcher; Megatron-core's process groups exist.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, spec: ModelSpec, parallel: ParallelSection
    ) -> None:
        own = {"model": config, "dtype": dtype}
        submodules = MoESubmodules(
            router=ModuleSpec(module=_Router, params=own),
            experts=ModuleSpec(module=_Experts, params=own | {"dispatcher": parallel.moe_token_dispatcher}),
            shared_experts=ModuleSpec(module=_SharedExperts, params=own | {"spec": spec}),
        )
        super().__init__(
            _layer_config(config, dtype, parallel),
            submodules,
            layer_number=1,
            pg_collection=get_default_pg_collection(),
        )
        # checkpoints call the router "gate": it is registered by that name only; MoELayer finds it by its own
        self.gate: _Router = self._modules.pop("router")
        self.__dict__["router"] = self.gate
        spec.mark_rows(self.gate.weight)
        self._dispatcher = parallel.moe_token_dispatcher
        self._weights_R: Tensor | None = None

    def forward(self, x_CD: Tensor) -> tuple[Tensor, Routing]:
        """[C, D] → [C, D], and the routing."""
        try:
            out, _ = super().forward(x_CD.unsqueeze(1))  # Megatron's [sequence, batch, hidden]
            routing = self.gate.routing
            assert routing is not None
            return out.squeeze(1), routing
        finally:  # what the parts remember would keep the graph, until the layer's next forward
            self.gate.routing = self._weights_R = None
            for name in _REMEMBERED:
                setattr(self.token_dispatcher, name, None)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Before the rows travel. The all-gather takes equally many from every rank: zero rows are added,
        which no expert reads."""
        if self._dispatcher == "allgather":
            missing = _most_rows(probs, self.ep_group) - len(probs)
            hidden_states = F.pad(hidden_states, (0, 0, 0, 0, 0, missing))
            probs, routing_map = F.pad(probs, (0, 0, 0, missing)), F.pad(routing_map, (0, 0, 0, missing))
        rows, weights = super().preprocess(hidden_states, probs, routing_map)
        self._weights_R = weights if self._dispatcher == "alltoall" else None
        return rows, weights

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The rows travel. Megatron-core reads the split sizes off a CUDA device; on the CPU they are tensors
        still."""
        dispatcher = self.token_dispatcher
        if self._dispatcher == "alltoall" and not hidden_states.is_cuda:
            dispatcher.input_splits = dispatcher.input_splits.tolist()
            dispatcher.output_splits = dispatcher.output_splits.tolist()
        found: tuple[Tensor, Tensor] = super().dispatch(hidden_states, probs)
        return found

    def postprocess(self, output: Tensor, shared_expert_output: Tensor) -> Tensor:
        """When the rows are back: weighted, summed per token, rounded to the model's dtype."""
        if self._weights_R is not None:
            output = output * self._weights_R.unsqueeze(-1)
        routed = super().postprocess(output, None)[: len(shared_expert_output)]
        summed: Tensor = routed.to(shared_expert_output.dtype) + shared_expert_output
        return summed


class _Router(Router):
    """The model's router, as MoELayer asks it. Megatron-core's own has neither stable ties nor losses that
    are weighted by occurrences, and needs Transformer Engine."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        model: ModelConfig,
        dtype: torch.dtype,
        pg_collection: ProcessGroupCollection,
        **newer: Any,
    ) -> None:
        super().__init__(model, dtype)
        self.routing: Routing | None = None

    def set_layer_number(self, layer_number: int) -> None:
        """For Megatron-core's logs only."""

    def forward(self, hidden_states: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[C, 1, D] → routing weights [C, E], zero elsewhere, and which experts are chosen, bool [C, E]."""
        routing = super().forward(hidden_states.squeeze(1))
        self.routing = routing
        probs = torch.zeros_like(routing.logits).scatter(1, routing.experts, routing.weights)
        chosen = torch.zeros_like(routing.logits, dtype=torch.bool).scatter_(1, routing.experts, True)
        return probs, chosen


class _Experts(Experts):
    """This rank's experts, as MoELayer asks them."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        model: ModelConfig,
        dtype: torch.dtype,
        dispatcher: TokenDispatcher,
        pg_collection: ProcessGroupCollection,
        **newer: Any,
    ) -> None:
        super().__init__(model, dtype, num_local_experts)
        self._dispatcher = dispatcher

    def forward(self, x_RD: Tensor, counts_E: Tensor, weights_R: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Rows grouped by expert → their outputs, weighted where they are summed on the way; and no bias."""
        y_RD = self.apply_experts(x_RD, counts_E.to(x_RD.device))
        if self._dispatcher == "allgather":
            y_RD = y_RD * weights_R.unsqueeze(-1)
        elif self._dispatcher == "flex":  # DeepEP carries the model's dtype only
            y_RD = (y_RD * weights_R.unsqueeze(-1)).to(x_RD.dtype)
        return y_RD, None


class _SharedExperts(SwiGLU):
    """The shared expert, as MoELayer asks it."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        model: ModelConfig,
        dtype: torch.dtype,
        spec: ModelSpec,
        pg_collection: ProcessGroupCollection,
        gate: bool,
        **newer: Any,
    ) -> None:
        super().__init__(model.hidden_size, shared_width(model), dtype, spec)


def _most_rows(rows: Tensor, group: dist.ProcessGroup) -> int:
    """The largest number of rows of any rank."""
    most = torch.tensor(len(rows), device=rows.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def _layer_config(config: ModelConfig, dtype: torch.dtype, parallel: ParallelSection) -> TransformerConfig:
    """What the layer and the dispatchers read; expert weights are never split over tensor-parallel ranks."""
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        ffn_hidden_size=config.intermediate_size,
        num_moe_experts=config.num_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_shared_expert_intermediate_size=shared_width(config),
        moe_token_dispatcher_type=parallel.moe_token_dispatcher,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        add_bias_linear=False,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
