"""Whole tensors out of the ranks' parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from harts_core.exec.parallel.groups import Groups
from harts_core.exec.parallel.placement import placement_of


def gather_whole(tensor: Tensor, like: Tensor, groups: Groups) -> Tensor:
    """The whole of a tensor that lies on the ranks as a parameter does; a copy, the same on every rank.

    Args:
        tensor: this rank's part: the parameter itself, its gradient, or a moment of the optimizer.
        like: the parameter.
        groups: every rank that holds a part calls this together.
    """
    placement = placement_of(like)
    if placement.split == "none":
        return tensor.detach().clone()
    group = groups.tensor if placement.split == "tensor" else groups.expert
    mine = tensor.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, placement.dim)


def join_stages(tensors: dict[str, Tensor], groups: Groups) -> dict[str, Tensor]:
    """The tensors of all stages on rank 0.

    Args:
        tensors: whole tensors of this stage, on the rank that speaks for it; others give none.
        groups: every rank calls this together.

    Returns:
        On rank 0 all of them, the first stage's first; elsewhere nothing.
    """
    if groups.stage.count == 1 or not groups.is_first_of_stage:
        return tensors if groups.rank == 0 else {}
    forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    stages: list[list[tuple[str, torch.Size, torch.dtype]]] = [[] for _ in range(groups.stage.count)]
    dist.all_gather_object(stages, forms, group=groups.pipeline)
    if groups.rank:
        for tensor in tensors.values():
            dist.send(tensor.contiguous(), 0, group=groups.pipeline)
        return {}
    device = next(iter(tensors.values())).device
    width = groups.tensor_and_data.size()
    for stage in range(1, groups.stage.count):
        for name, shape, dtype in stages[stage]:
            tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensors[name], stage * width, group=groups.pipeline)
    return tensors
