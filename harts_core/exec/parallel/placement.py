"""Which part of a parameter a rank holds, in Megatron-core's attributes on the parameter.

``tensor_model_parallel`` and ``partition_dim``: split over the tensor-parallel ranks. ``allreduce`` = False:
experts, split over the expert-parallel ranks along dimension 0. ``sequence_parallel``: whole on every
tensor-parallel rank, but each rank's gradient is only its own rows' or heads' part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Split = Literal["none", "tensor", "expert"]


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on the ranks.

    Attributes:
        split: over which ranks, in equal parts in rank order.
        dim: along which dimension.
        partial: whether a tensor-parallel rank's gradient is only a part of the sum.
    """

    split: Split = "none"
    dim: int = 0
    partial: bool = False


def placement_of(tensor: Tensor) -> Placement:
    """The placement of a parameter or buffer; one without marks is whole on every rank."""
    if not getattr(tensor, "allreduce", True):
        return Placement(split="expert")
    if getattr(tensor, "tensor_model_parallel", False):
        return Placement(split="tensor", dim=int(getattr(tensor, "partition_dim", 0)))
    return Placement(partial=bool(getattr(tensor, "sequence_parallel", False)))


def mark_split(tensor: Tensor, dim: int = 0) -> None:
    """Split over the tensor-parallel ranks along a dimension."""
    tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    tensor.partition_stride = 1  # type: ignore[attr-defined]


def mark_partial(tensor: Tensor) -> None:
    """Whole on every tensor-parallel rank, with gradients that add up over them."""
    tensor.sequence_parallel = True  # type: ignore[attr-defined]


def mark_expert(tensor: Tensor) -> None:
    """Split over the expert-parallel ranks along dimension 0."""
    tensor.allreduce = False  # type: ignore[attr-defined]
