"""The sequential part of the chunkwise form: states from chunk to chunk, all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Tensor, w: Tensor, k: Tensor, decay: Tensor, initial: Tensor, step_rows: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        v = torch.empty_like(u)
        before = u.new_empty(u.shape[0], w.shape[-1], u.shape[-1])
        last = torch.empty_like(initial)
        S, start = initial, 0
        for i, rows in enumerate(step_rows):
            step = slice(start, start + rows)
            before[step] = S
            torch.baddbmm(u[step], w[step], S, alpha=-1, out=v[step])
            S = torch.baddbmm(decay[step] * S, k[step].mT, v[step])
            continuing = step_rows[i + 1] if i + 1 < len(step_rows) else 0
            last[continuing:rows] = S[continuing:]
            S, start = S[:continuing], start + rows
        ctx.save_for_backward(w, k, decay, v, before)
        ctx.step_rows = step_rows
        return v, before, last

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dv: Tensor, dbefore: Tensor, dlast: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None]:
        w, k, decay, v, before = ctx.saved_tensors
        du = torch.empty_like(v)
        dafter = torch.empty_like(before)
        dS, stop = dlast[:0], v.shape[0]
        for rows in reversed(ctx.step_rows):
            step = slice(stop - rows, stop)
            d = dafter[step]
            d[: dS.shape[0]] = dS
            d[dS.shape[0] :] = dlast[dS.shape[0] : rows]
            torch.baddbmm(dv[step], k[step], d, out=du[step])
            dS = torch.addcmul(dbefore[step], decay[step], d).baddbmm_(w[step].mT, du[step], alpha=-1)
            stop -= rows
        ddecay = (dafter * before).sum(-1, keepdim=True)
        return du, -(du @ before.mT), v @ dafter.mT, ddecay, dS, None


def chunk_scan(
    u: Tensor, w: Tensor, k: Tensor, decay: Tensor, initial: Tensor, step_rows: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run v = u − w S, S ← decay ⊙ S + kᵀ v through the steps.

    Gradients that arrive at returned states enter the reverse recurrence where those states arise; there is
    no other path, so a state handed to another call costs nothing extra here.

    Args:
        u: [R, W, V]; w, k: [R, W, K]; decay: [R, K, 1]; R = C · H rows, chunks in step-major order.
        initial: [N · H, K, V], by rank.
        step_rows: rows in each step, falling; their sum is R.

    Returns:
        v [R, W, V], states before each chunk [R, K, V], states after each sequence's last chunk
        [N · H, K, V] by rank.
    """
    return cast(
        tuple[Tensor, Tensor, Tensor],
        _ChunkScan.apply(u, w, k, decay, initial, step_rows),  # type: ignore[no-untyped-call]
    )
