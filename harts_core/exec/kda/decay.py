"""Products of rows and columns of a chunk under the decay between them, safe for every gate ≤ 0.

The chunkwise form needs Σ_κ x_tκ k_sκ exp(G_tκ − G_sκ) for s ≤ t, with G the running sum of the log
gates. One matrix product wants exp(G_t) and exp(−G_s) apart, and exp(−G_s) overflows float32 as soon as
a chunk forgets by more than e^88: for gates of −5 after 18 tokens, for unbounded gates at once. Here
every block of the dyadic decomposition (rows after, columns before the middle of a run of 2m positions)
takes the middle as its reference:

    G_t − G_s = (G_t − G_mid) + (G_mid − G_s),   both ≤ 0,

so both factors lie in [0, 1]. A factor that underflows to 0 stands for a product that is smaller still.

The exponents themselves are never differences: ``RunSums`` adds gates outwards from the middles, so a
sum of non-positive numbers has a few ulp of *relative* error whatever the chunk's total decay is, and a
gate of −inf is just a factor 0. (G_t − G_s from one running sum would be wrong by 1e-4 after a chunk
that decays by e^−1000.)
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts_core.exec.kda.dyadic import block_sizes, halves, lower_blocks, suffix_sums_


class RunSums:
    """Sums of log gates inside runs of m positions, for m = 1, 2, 4, …

    Args:
        g: log gates [..., W, K], W a power of two.

    Attributes:
        from_start: [..., W, K], Σ g over the run's positions up to and including t.
        to_end: [..., W, K], Σ g over the run's positions after s.
    """

    def __init__(self, g: Tensor) -> None:
        self.m = 1
        self.from_start = g.clone(memory_format=torch.contiguous_format)
        self.to_end = torch.zeros_like(self.from_start)

    def grow(self) -> None:
        """Double the run length."""
        first, second = halves(self.from_start, self.m)
        before, _ = halves(self.to_end, self.m)
        before += second[..., -1:, :]
        second += first[..., -1:, :]
        self.m *= 2


class _DecayProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, b: Tensor, k: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        width = g.shape[-2]
        P = q.new_zeros(*q.shape[:-1], width)
        A = torch.zeros_like(P)
        P.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        sums = RunSums(g)
        for m in block_sizes(width):
            rows, cols, _, _ = _factors(q, b, k, sums)
            products = rows @ cols.mT
            lower_blocks(P, m).copy_(products[..., :m, :])
            lower_blocks(A, m).copy_(products[..., m:, :])
            sums.grow()
        ctx.save_for_backward(q, b, k, g)
        return P, A, sums.from_start, sums.to_end

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dP: Tensor, dA: Tensor, dfrom_start: Tensor, dto_end: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, b, k, g = ctx.saved_tensors
        dq, db, dk = torch.zeros_like(q), torch.zeros_like(b), torch.zeros_like(k)
        sums = RunSums(g)
        for m in block_sizes(g.shape[-2]):
            rows, cols, row_decay, col_decay = _factors(q, b, k, sums)
            d = torch.cat([lower_blocks(dP, m), lower_blocks(dA, m)], -2)
            drows = d @ cols
            halves(dq, m)[1].addcmul_(drows[..., :m, :], row_decay)
            halves(db, m)[1].addcmul_(drows[..., m:, :], row_decay)
            halves(dk, m)[0].addcmul_(d.mT @ rows, col_decay)
            sums.grow()
        # A block's value depends on G_t − G_s only (the middle cancels), so x·∂x is the gradient of G
        # at the rows and −k·∂k that at the columns. The diagonal of P does not depend on G and comes
        # after.
        dG = dfrom_start - dto_end
        dG.addcmul_(q, dq).addcmul_(b, db).addcmul_(k, dk, value=-1)
        dG[..., -1, :] += dto_end.sum(-2)
        diagonal = dP.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq.addcmul_(diagonal, k)
        dk.addcmul_(diagonal, q)
        return dq, db, dk, suffix_sums_(dG)


def _factors(q: Tensor, b: Tensor, k: Tensor, sums: RunSums) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands of the blocks of size m: decayed rows [q; b] [..., W/2m, 2m, K], decayed columns k
    [..., W/2m, m, K], and the two decays."""
    m = sums.m
    row_decay = halves(sums.from_start, m)[1].exp()
    col_decay = halves(sums.to_end, m)[0].exp()
    rows = row_decay.new_empty(*row_decay.shape[:-2], 2 * m, row_decay.shape[-1])
    torch.mul(halves(q, m)[1], row_decay, out=rows[..., :m, :])
    torch.mul(halves(b, m)[1], row_decay, out=rows[..., m:, :])
    return rows, halves(k, m)[0] * col_decay, row_decay, col_decay


def decay_products(q: Tensor, b: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decayed products inside chunks, with G_t = Σ_{r ≤ t} g_r.

    Args:
        q, b: row operands [..., W, K].
        k: column operand [..., W, K].
        g: log gates [..., W, K], ≤ 0.

    Returns:
        P [..., W, W]: Σ_κ q_t k_s exp(G_t − G_s) for s ≤ t, else 0.
        A [..., W, W]: Σ_κ b_t k_s exp(G_t − G_s) for s < t, else 0.
        from_start [..., W, K]: G_t.
        to_end [..., W, K]: G_W − G_t, summed without cancellation.
    """
    return cast(
        tuple[Tensor, Tensor, Tensor, Tensor],
        _DecayProducts.apply(q, b, k, g),  # type: ignore[no-untyped-call]
    )
