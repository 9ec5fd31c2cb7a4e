"""The model's parts on Megatron-core: split linears, embedding and experts, sequence parallelism.

Within a tensor-parallel group every split layer reads the rows of the whole unit and holds its own heads or
columns. Between them, with sequence parallelism, each rank holds an equal share of the unit's rows, padded to
a multiple of the ranks; without, all rows. The rows are gathered once per layer half (``enter``), not by
every linear that reads them; the output projection sums and scatters them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from torch import Tensor, nn

from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model.moe import MoE
from harts_core.exec.model.norm import RMSNorm
from harts_core.exec.model.spec import LOCAL_SPEC, Linear, ModelSpec, Shard
from harts_core.exec.parallel.experts import ExpertParallelMoE
from harts_core.exec.parallel.groups import Groups
from harts_core.exec.parallel.placement import mark_expert, mark_partial, mark_split, placement_of


def parallel_spec(groups: Groups) -> ModelSpec:
    """The parts of a model that is split over the groups' tensor- and expert-parallel ranks."""
    parallel, tensor = groups.parallel, groups.tensor
    size, rank = tensor.size(), tensor.rank()
    counts = {"none": 1, "tensor": size, "expert": groups.expert.size()}
    indices = {"none": 0, "tensor": rank, "expert": groups.expert.rank()}

    def shard_of(parameter: Tensor) -> Shard:
        placement = placement_of(parameter)
        return Shard(placement.dim, indices[placement.split], counts[placement.split])

    def moe(config: ModelConfig, dtype: torch.dtype, spec: ModelSpec) -> nn.Module:
        found = (
            MoE(config, dtype, spec) if parallel.ep == 1 else ExpertParallelMoE(config, dtype, spec, parallel)
        )
        for parameter in found.experts.parameters():
            mark_expert(parameter)  # with SP every rank's rows go to them, also where they are not split
        return found

    if size == 1:
        return replace(LOCAL_SPEC, moe=moe, shard_of=shard_of, stage=groups.stage)

    def enter(x: Tensor) -> Tensor:
        gathered: Tensor
        if parallel.sp:
            gathered = mappings.gather_from_sequence_parallel_region(x, group=tensor)
        else:
            gathered = mappings.copy_to_tensor_model_parallel_region(x, group=tensor)
        return gathered

    def local_rows(values: Tensor) -> Tensor:
        return pad_rows(values, size).chunk(size)[rank] if parallel.sp else values

    return ModelSpec(
        column_linear=lambda width, out, dtype: _Column(width, out, _config(groups, dtype), tensor),
        row_linear=lambda width, out, dtype: _Row(width, out, _config(groups, dtype), tensor),
        replicated_linear=Linear,
        embedding=lambda vocab, width, dtype: _Embedding(vocab, width, _config(groups, dtype), tensor),
        lm_head=lambda width, vocab, dtype: _Column(width, vocab, _config(groups, dtype), tensor),
        norm=RMSNorm,
        moe=moe,
        tensor_parallel=size,
        tensor_group=tensor,
        enter=enter,
        local_rows=local_rows,
        mark_split=mark_split,
        mark_shared=mark_partial,
        mark_rows=mark_partial if parallel.sp else LOCAL_SPEC.mark_rows,
        shard_of=shard_of,
        stage=groups.stage,
    )


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Zero rows behind the last, up to a multiple."""
    missing = -len(x) % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def _config(groups: Groups, dtype: torch.dtype) -> ModelParallelConfig:
    """Weights are allocated on the CPU and filled by the model's own seeded init."""
    return ModelParallelConfig(
        tensor_model_parallel_size=groups.parallel.tp,
        sequence_parallel=groups.parallel.sp,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
    )


class _Stateless:
    """Without the empty ``_extra_state`` that Megatron's linears have for Transformer Engine."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class _Column(_Stateless, ColumnParallelLinear):  # type: ignore[misc]
    """Output columns split over the ranks. The input has entered the region already: no communication."""

    def __init__(
        self, width: int, out: int, config: ModelParallelConfig, group: torch.distributed.ProcessGroup
    ) -> None:
        config.sequence_parallel = False  # the rows are gathered by ``enter``, and their gradients summed
        super().__init__(
            width,
            out,
            config=config,
            init_method=nn.init.zeros_,
            bias=False,
            disable_grad_reduce=True,
            tp_group=group,
        )
        mark_split(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] → [rows, this rank's columns]."""
        out: Tensor = super().forward(x)[0]
        return out


class _Row(_Stateless, RowParallelLinear):  # type: ignore[misc]
    """Input columns split over the ranks; the outputs are summed, each rank keeping its rows under SP."""

    def __init__(
        self, width: int, out: int, config: ModelParallelConfig, group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__(
            width,
            out,
            config=config,
            init_method=nn.init.zeros_,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=group,
        )
        mark_split(self.weight, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, this rank's columns] → [rows of this rank, out]."""
        if self.sequence_parallel:
            x = pad_rows(x, self.tp_group.size())
        out: Tensor = super().forward(x)[0]
        return out


class _Embedding(VocabParallelEmbedding):  # type: ignore[misc]
    """The vocabulary split over the ranks."""

    def __init__(
        self, vocab: int, width: int, config: ModelParallelConfig, group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__(
            vocab,
            width,
            init_method=nn.init.zeros_,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=group,
        )
        mark_split(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [C] → [rows of this rank, width]."""
        if not self.reduce_scatter_embeddings:
            out: Tensor = super().forward(tokens)
            return out
        padded = pad_rows(tokens, self.tp_group.size()).unsqueeze(0)
        scattered: Tensor = super().forward(padded)
        return scattered.squeeze(1)
