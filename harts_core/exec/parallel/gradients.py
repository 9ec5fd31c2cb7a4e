"""Gradients over the ranks: a parameter's whole gradient on every rank that holds it, and the global norm.

Each rank has accumulated the gradients of its own units in float32. Sums go through flat buffers in the order
of the parameters, so that they do not depend on timing: a run repeated on the same ranks gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from harts_core.exec.optimizer import Optimizer
from harts_core.exec.parallel.groups import Groups
from harts_core.exec.parallel.placement import Placement, placement_of

BUFFER_BYTES = 64 << 20
"""Largest flat buffer; a larger gradient goes alone."""


def reduce_gradients(optimizer: Optimizer, groups: Groups) -> float:
    """Sum the accumulated gradients over the ranks, in place.

    Returns:
        The global 2-norm over all parameters, each counted once; the same on every rank.
    """
    gradients = [
        (placement_of(parameter), optimizer.gradient(name)) for name, parameter in optimizer.parameters()
    ]
    partial = [g for placement, g in gradients if placement.partial]
    dense = [g for placement, g in gradients if placement.split != "expert"]
    experts = [g for placement, g in gradients if placement.split == "expert"]
    for group, tensors in ((groups.tensor, partial), (groups.data, dense), (groups.expert_data, experts)):
        _sum(tensors, group)
    return _norm(gradients, groups)


def _norm(gradients: Sequence[tuple[Placement, Tensor]], groups: Groups) -> float:
    """Each rank counts what no other rank of its stage counts."""
    first = {
        "none": groups.tensor_and_data.rank() == 0,
        "tensor": groups.data.rank() == 0,
        "expert": groups.expert_data.rank() == 0,
    }
    total = torch.zeros((), dtype=torch.float64, device=gradients[0][1].device)
    for placement, gradient in gradients:
        if first[placement.split]:
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    dist.all_reduce(total)
    return math.sqrt(float(total))


def _sum(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if group.size() == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one dtype, up to ``BUFFER_BYTES`` each."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and (num_bytes + tensor.nbytes > BUFFER_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket
