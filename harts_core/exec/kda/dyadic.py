"""Dyadic blocks of square lower-triangular matrices: the pieces that the chunkwise form is assembled from.

A lower triangle of width W = 2^L is its diagonal plus, for each size m = 1, 2, 4, …, W/2, the W / 2m square
blocks whose rows are the second half and whose columns are the first half of a run of 2m positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def block_sizes(width: int) -> Iterator[int]:
    """1, 2, 4, …, width / 2."""
    m = 1
    while m < width:
        yield m
        m *= 2


def halves(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """First and second halves of every run of 2m rows: x [..., W, K] -> two views [..., W / 2m, m, K]."""
    pairs = torch.unflatten(x, -2, (-1, 2, m))
    return pairs.select(-3, 0), pairs.select(-3, 1)


def diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal as one view: x [..., W, W] -> [..., W / size, size, size]."""
    blocks = torch.unflatten(torch.unflatten(x, -1, (-1, size)), -3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def lower_blocks(x: Tensor, m: int) -> Tensor:
    """The off-diagonal blocks of size m as one view: x [..., W, W] -> [..., W / 2m, m, m]."""
    return diagonal_blocks(x, 2 * m)[..., m:, :m]


def suffix_sums_(x: Tensor) -> Tensor:
    """Σ over t ≥ s of the rows of x [..., W, K], W a power of two, in place."""
    for m in block_sizes(x.shape[-2]):
        first, second = halves(x, m)
        first += second[..., :1, :]
    return x


class _InverseUnitLower(torch.autograd.Function):
    """X = (I + N)⁻¹ by merging the inverses of the two halves of every run."""

    @staticmethod
    def forward(ctx: Any, N: Tensor) -> Tensor:
        width = N.shape[-1]
        X = torch.eye(width, dtype=N.dtype, device=N.device).expand(N.shape).contiguous()
        for m in block_sizes(width):
            runs = diagonal_blocks(X, 2 * m)
            first, second = runs[..., :m, :m], runs[..., m:, m:]
            runs[..., m:, :m] = -(second @ (lower_blocks(N, m) @ first))
        ctx.save_for_backward(X)
        return X

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dX: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        XT = X.mT
        dN: Tensor = XT @ dX @ XT
        return dN.tril_(-1).neg_()


def inverse_unit_lower(N: Tensor) -> Tensor:
    """(I + N)⁻¹ for strictly lower-triangular N [..., W, W], W a power of two.

    With the halves of a run, (I + [[N₁, 0], [M, N₂]])⁻¹ = [[X₁, 0], [−X₂ M X₁, X₂]]: exact forward
    substitution in log₂ W batched steps. Unlike the Neumann series (I − N)(I + N²)(I + N⁴)…, whose
    factors grow to binomial size and cancel, it never forms a power of N: with identical keys and β = 1
    all its entries stay in {−1, 0, 1}. Gradient: dN = −Xᵀ dX Xᵀ below the diagonal.
    """
    return cast(Tensor, _InverseUnitLower.apply(N))  # type: ignore[no-untyped-call]
