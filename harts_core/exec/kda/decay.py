"""Products of rows and columns of a chunk under the decay between them, safe for every gate ≤ 0.

The chunkwise form needs Σ_κ x_tκ k_sκ exp(G_tκ − G_sκ) for s ≤ t, with G the running sum of the log
gates. One matrix product wants exp(G_t) and exp(−G_s) apart, and exp(−G_s) overflows float32 as soon as
a chunk forgets by more than e^88: for gates of −5 after 18 tokens, for unbounded gates at once. Here
every block of the dyadic decomposition (rows after, columns before the middle of a run of 2m positions)
takes the middle as its reference:

    G_t − G_s = (G_t − G_mid) + (G_mid − G_s),   both ≤ 0,

so both factors lie in [0, 1]. A factor that underflows to 0 stands for a product that is smaller still.

Decays are never taken from differences of running sums: ``RunDecays`` multiplies the factors exp(g) outwards
from the middles, so each decay carries a few ulp of *relative* error whatever the chunk's total decay is,
costs a multiplication instead of an exponential, and a gate of −inf is just a factor 0. (exp(G_t − G_s) from
one running sum would be wrong by 1e-4 after a decay of e^−1000 elsewhere in the chunk.)
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts_core.exec.kda.dyadic import block_sizes, halves, lower_blocks, suffix_sums_


class RunDecays:
    """Decays inside runs of m positions, for m = 1, 2, 4, …

    Args:
        g: log gates [R, W, K], W a power of two.

    Attributes:
        from_start: [R, W, K], Π exp(g) over the run's positions up to and including t.
        to_end: [R, W, K], Π exp(g) over the run's positions after s.
    """

    def __init__(self, g: Tensor) -> None:
        self.m = 1
        self.from_start = g.exp()
        self.to_end = torch.ones_like(self.from_start)

    def grow(self) -> None:
        """Double the run length."""
        first, second = halves(self.from_start, self.m)
        before, _ = halves(self.to_end, self.m)
        before *= second[..., -1:, :]
        second *= first[..., -1:, :]
        self.m *= 2


class _Operands:
    """The operands of the blocks of one size, in buffers that all sizes share.

    ``fill`` sets rows [R · W/2m, 2m, K], the decayed q and then b after each middle, and cols
    [R · W/2m, m, K], the decayed k before it.
    """

    def __init__(self, q: Tensor, b: Tensor, k: Tensor) -> None:
        self.q, self.b, self.k = q, b, k
        self.rows = q.new_empty(q.numel())
        self.cols = q.new_empty(q.numel() // 2)

    def fill(self, decays: RunDecays) -> tuple[Tensor, Tensor]:
        R, W, K = self.q.shape
        m = decays.m
        rows, cols = self.rows.view(R, W // (2 * m), 2 * m, K), self.cols.view(R, W // (2 * m), m, K)
        row_decay, col_decay = halves(decays.from_start, m)[1], halves(decays.to_end, m)[0]
        torch.mul(halves(self.q, m)[1], row_decay, out=rows[:, :, :m])
        torch.mul(halves(self.b, m)[1], row_decay, out=rows[:, :, m:])
        torch.mul(halves(self.k, m)[0], col_decay, out=cols)
        return rows.flatten(0, 1), cols.flatten(0, 1)


class _DecayProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, b: Tensor, k: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        R, W, _ = g.shape
        P, A = q.new_zeros(R, W, W), q.new_zeros(R, W, W)
        P.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        operands, decays = _Operands(q, b, k), RunDecays(g)
        for m in block_sizes(W):
            rows, cols = operands.fill(decays)
            products = torch.bmm(rows, cols.mT).view(R, W // (2 * m), 2 * m, m)
            lower_blocks(P, m).copy_(products[:, :, :m])
            lower_blocks(A, m).copy_(products[:, :, m:])
            decays.grow()
        ctx.save_for_backward(q, b, k, g, decays.from_start, decays.to_end)
        return P, A, decays.from_start, decays.to_end

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dP: Tensor, dA: Tensor, dfrom_start: Tensor, dto_end: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, b, k, g, from_start, to_end = ctx.saved_tensors
        R, W, K = g.shape
        dq, db, dk = torch.zeros_like(q), torch.zeros_like(b), torch.zeros_like(k)
        drows, dcols = q.new_empty(q.numel()), q.new_empty(q.numel() // 2)
        operands, decays = _Operands(q, b, k), RunDecays(g)
        for m in block_sizes(W):
            rows, cols = operands.fill(decays)
            d = torch.cat([lower_blocks(dP, m), lower_blocks(dA, m)], -2).flatten(0, 1)
            # d @ cols; for m = 1 an outer product, ten times slower as thousands of tiny matmuls
            (torch.mul if m == 1 else torch.bmm)(d, cols, out=drows.view(-1, 2 * m, K))
            torch.bmm(d.mT, rows, out=dcols.view(-1, m, K))
            dq_db = drows.view(R, W // (2 * m), 2 * m, K)
            row_decay = halves(decays.from_start, m)[1]
            halves(dq, m)[1].addcmul_(dq_db[:, :, :m], row_decay)
            halves(db, m)[1].addcmul_(dq_db[:, :, m:], row_decay)
            halves(dk, m)[0].addcmul_(dcols.view(R, W // (2 * m), m, K), halves(decays.to_end, m)[0])
            decays.grow()
        # A block's value depends on G_t − G_s only (the middle cancels), so x·∂x is the gradient of G at the
        # rows and −k·∂k that at the columns. The diagonal of P does not depend on G and comes after.
        end = dto_end * to_end
        dG = (dfrom_start * from_start).sub_(end)
        dG.addcmul_(q, dq).addcmul_(b, db).addcmul_(k, dk, value=-1)
        dG[:, -1] += end.sum(-2)
        diagonal = dP.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq.addcmul_(diagonal, k)
        dk.addcmul_(diagonal, q)
        return dq, db, dk, suffix_sums_(dG)


def decay_products(q: Tensor, b: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decayed products inside chunks, with G_t = Σ_{r ≤ t} g_r.

    Args:
        q, b: row operands [R, W, K], contiguous.
        k: column operand [R, W, K], contiguous.
        g: log gates [R, W, K], ≤ 0.

    Returns:
        P [R, W, W]: Σ_κ q_t k_s exp(G_t − G_s) for s ≤ t, else 0.
        A [R, W, W]: Σ_κ b_t k_s exp(G_t − G_s) for s < t, else 0.
        from_start [R, W, K]: exp(G_t).
        to_end [R, W, K]: exp(G_W − G_t).
    """
    return cast(
        tuple[Tensor, Tensor, Tensor, Tensor],
        _DecayProducts.apply(q, b, k, g),  # type: ignore[no-untyped-call]
    )
