"""Gradients over the ranks, in the buffers of Megatron-core's DistributedDataParallel.

Each rank adds up the gradients of its own units in the buffers (``main_grad``, float32 or wider); they are
summed over the ranks once, at the end of the step. The buffers lie in the order of the parameters, so the
sums do not depend on timing: a run repeated on the same ranks gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from harts_core.exec.gradients import norm_of
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.parallel.groups import Groups
from harts_core.exec.parallel.placement import placement_of


@dataclass(frozen=True, slots=True, eq=False)
class ShardMap:
    """Which elements of a parameter's gradient the ranks that sum it up hold behind the sum.

    Attributes:
        group: these ranks.
        ranges: for each of them [start, stop) of the flattened parameter; empty where it holds none.
    """

    group: dist.ProcessGroup
    ranges: tuple[tuple[int, int], ...]

    @property
    def own(self) -> slice:
        """Of this rank."""
        return slice(*self.ranges[self.group.rank()])

    def gather(self, shard: Tensor, shape: torch.Size) -> Tensor:
        """The whole out of the ranks' shards; all of them call this together.

        Args:
            shard: this rank's, flat.
            shape: of the whole.
        """
        whole = shard.new_empty(shape.numel())
        whole[self.own] = shard
        for rank, (start, stop) in enumerate(self.ranges):
            if start < stop:  # most lie on one rank, or on two
                dist.broadcast(whole[start:stop], dist.get_global_rank(self.group, rank), group=self.group)
        return whole.view(shape)


class DdpGradients:
    """The gradients of a split model (``Gradients``).

    Args:
        model: of this rank; with ``sharded`` its parameters move into the buffers, too.
        groups: of this process.
        sharded: behind the sum a data-parallel rank needs its shard of the gradients only (``ShardMap``); the
            rest of its buffers is undefined. Otherwise every rank gets all.
    """

    def __init__(self, model: HybridModel, groups: Groups, *, sharded: bool) -> None:
        self._groups, self._sharded = groups, sharded
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.ddp = DistributedDataParallel(
            _megatron_config(model),
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=model.dtype.itemsize < torch.float32.itemsize,
                # how many backward passes reach a parameter differs from step to step and from rank to rank,
                # and a producer's comes after that of its last consumer: only the end of the step is known
                overlap_grad_reduce=False,
                use_distributed_optimizer=sharded,
            ),
            model,
            pg_collection=_process_group_collection(groups),
        )

    def zero(self) -> None:
        """See ``Gradients``."""
        self.ddp.zero_grad_buffer()

    def find(self) -> dict[str, Tensor]:
        """See ``Gradients``; zeros where there is none."""
        return {name: main_grad(parameter) for name, parameter in self.parameters.items()}

    def get(self, name: str) -> Tensor:
        """See ``Gradients``; with shards the ranks call it together, and it is a copy."""
        gradient = main_grad(self.parameters[name])
        if not self._sharded:
            return gradient
        shards = self.shards(name)
        return shards.gather(gradient.flatten()[shards.own], gradient.shape)

    def norm(self) -> float:
        """See ``Gradients``."""
        return norm_of(self.find().values())

    def finish(self) -> float:
        """See ``Gradients``: partial ones over the tensor-parallel ranks, dense ones over the data-parallel
        ranks, experts over those that hold the same ones."""
        self._sum_partial()
        self.ddp.finish_grad_sync()
        mine = norm_of(self._counted_here()) ** 2
        total = torch.tensor(mine, dtype=torch.float64, device=next(iter(self.parameters.values())).device)
        dist.all_reduce(total)
        return math.sqrt(float(total))

    def _sum_partial(self) -> None:
        """In one buffer, in the order of the parameters."""
        partial = [main_grad(p) for p in self.parameters.values() if placement_of(p).partial]
        if not partial:
            return
        flat = torch.cat([gradient.flatten() for gradient in partial])
        dist.all_reduce(flat, group=self._groups.tensor)
        parts = torch.split(flat, [gradient.numel() for gradient in partial])
        for gradient, part in zip(partial, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def shards(self, name: str) -> ShardMap:
        """Where a parameter's elements are: in equal parts of its bucket, in rank order."""
        parameter = self.parameters[name]
        split = placement_of(parameter).split
        group = self._groups.expert_data if split == "expert" else self._groups.data
        buffers = self.ddp.expert_parallel_buffers if split == "expert" else self.ddp.buffers
        buffer = next(buffer for buffer in buffers if parameter in buffer.param_index_map)
        start, stop, index = buffer.param_index_map[parameter]
        bucket = buffer.buckets[index]
        size = bucket.grad_data.numel() // group.size()
        firsts = [bucket.offset + rank * size for rank in range(group.size())]
        ranges = [(max(start, first) - start, min(stop, first + size) - start) for first in firsts]
        return ShardMap(group, tuple((a, b) if a < b else (0, 0) for a, b in ranges))

    def _counted_here(self) -> Iterator[Tensor]:
        """Of every parameter what no other rank of its stage counts, flat."""
        groups = self._groups
        for name, parameter in self.parameters.items():
            placement, gradient = placement_of(parameter), main_grad(parameter).flatten()
            if placement.split == "none" and groups.tensor.rank():
                continue
            if self._sharded:
                yield gradient[self.shards(name).own]
            elif (groups.expert_data if placement.split == "expert" else groups.data).rank() == 0:
                yield gradient


def main_grad(parameter: Tensor) -> Tensor:
    """A parameter's place in the gradient buffers."""
    place: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return place


def _process_group_collection(groups: Groups) -> ProcessGroupCollection:
    """The groups, under Megatron-core's names."""
    return ProcessGroupCollection(
        tp=groups.tensor,
        pp=groups.pipeline,
        ep=groups.expert,
        dp=groups.data,
        dp_cp=groups.data,
        expt_dp=groups.expert_data,
        intra_dist_opt=None,
    )


def _megatron_config(model: HybridModel) -> TransformerConfig:
    """What the wrapper reads of it, and what it cannot be without."""
    return TransformerConfig(
        num_layers=model.config.num_hidden_layers,
        hidden_size=model.config.hidden_size,
        num_attention_heads=model.config.num_attention_heads,
        # sums over ranks instead of means: the losses have been divided by step-wide numbers
        calculate_per_token_loss=True,
    )
