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
