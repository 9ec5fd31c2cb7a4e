"""Causal attention over a forest of token paths, without an S × S matrix.

Every sequence's queries see the keys of their ancestors and, bottom-right causal, their own. Keys and values
lie once per compact token; a sequence's are put together from a few contiguous runs. Queries go in blocks, so
that the largest matrix is block × path, and the backward pass recomputes the probabilities from the saved
log-normalisers: memory stays linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harts_core.exec.kda import state_dtype

if TYPE_CHECKING:
    from harts_core.exec.layout import AttentionSpan

QUERY_BLOCK = 256
"""Queries per block."""


def forest_attention(
    q_CHK: Tensor, k_RHK: Tensor, v_RHV: Tensor, spans: Sequence[AttentionSpan], scale: float
) -> Tensor:
    """softmax(scale · q kᵀ) v, each query over its own path.

    Args:
        q_CHK: queries of the own rows.
        k_RHK, v_RHV: keys and values, own rows first, then imported ones.
        spans: the sequences; their own rows cover [0, C) exactly.
        scale: factor on the scores.

    Returns:
        o_CHV in v's dtype; computed in the state dtype.
    """
    dtype = state_dtype(q_CHK.dtype)
    q, k, v = (x.to(dtype).transpose(0, 1).contiguous() for x in (q_CHK, k_RHK, v_RHV))
    out: Tensor = _ForestAttention.apply(q, k, v, spans, scale)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1).to(v_RHV.dtype)


class _ForestAttention(torch.autograd.Function):
    """Head-major tensors [H, rows, width]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Sequence[AttentionSpan], scale: float
    ) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        lse = q.new_empty(q.shape[0], q.shape[1], 1)
        for span in spans:
            keys, values = _gather(k, span), _gather(v, span)
            for first, last, seen in _blocks(span):
                scores = _scores(q[:, first:last], keys[:, :seen], scale)
                norm = torch.logsumexp(scores, -1, keepdim=True)
                lse[:, first:last] = norm
                torch.bmm(scores.sub_(norm).exp_(), values[:, :seen], out=out[:, first:last])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (grad * out).sum(-1, keepdim=True)
        for span in ctx.spans:
            keys, values = _gather(k, span), _gather(v, span)
            dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
            for first, last, seen in _blocks(span):
                rows = slice(first, last)
                p = _scores(q[:, rows], keys[:, :seen], ctx.scale).sub_(lse[:, rows]).exp_()
                dvalues[:, :seen].baddbmm_(p.transpose(1, 2), grad[:, rows])
                dp = torch.bmm(grad[:, rows], values[:, :seen].transpose(1, 2))
                ds = dp.sub_(delta[:, rows]).mul_(p).mul_(ctx.scale)
                torch.bmm(ds, keys[:, :seen], out=dq[:, rows])
                dkeys[:, :seen].baddbmm_(ds.transpose(1, 2), q[:, rows])
            _scatter(dk, dkeys, span)
            _scatter(dv, dvalues, span)
        return dq, dk, dv, None, None


def _runs(span: AttentionSpan) -> tuple[tuple[int, int], ...]:
    return (*span.ancestors, (span.start, span.stop))


def _gather(x: Tensor, span: AttentionSpan) -> Tensor:
    """Rows of the span's whole path, in path order."""
    if not span.ancestors:
        return x[:, span.start : span.stop]
    return torch.cat([x[:, a:b] for a, b in _runs(span)], 1)


def _scatter(total: Tensor, part: Tensor, span: AttentionSpan) -> None:
    """Add a path's gradients to the rows they belong to."""
    at = 0
    for a, b in _runs(span):
        total[:, a:b] += part[:, at : at + b - a]
        at += b - a


def _blocks(span: AttentionSpan) -> Iterator[tuple[int, int, int]]:
    """(first query row, last, keys of the path that the last query sees)."""
    before = sum(b - a for a, b in span.ancestors)
    for first in range(span.start, span.stop, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, span.stop)
        yield first, last, before + last - span.start


def _scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """scale · q kᵀ, −∞ where the key comes after the query; the queries are the keys' last positions."""
    scores = torch.bmm(q, keys.transpose(1, 2)).mul_(scale)
    n = q.shape[1]
    if n > 1:
        future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
        scores[:, :, scores.shape[2] - n :].masked_fill_(future, float("-inf"))
    return scores
