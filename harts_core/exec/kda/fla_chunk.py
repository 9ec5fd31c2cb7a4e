"""Chunked KDA on flash-linear-attention's kernels as one autograd function with boundary states.

Everything inside a chunk is flash-linear-attention's: decay products, triangular solve, outputs, and
their gradients. Between chunks run ``state_kernels``. The backward pass recomputes what the forward
pass can give up (w, u, decayed q and k, states before each chunk) from the saved triangular factors.

Importing this module needs triton and flash-linear-attention; ``fla.kda_fla`` checks for them first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra, chunk_kda_fwd_intra
from fla.ops.kda.wy_fast import recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts_core.exec.kda.call import KdaCall
from harts_core.exec.kda.state_kernels import state_backward, state_forward

LOG2_E = 1.4426950408889634
"""Log gates are kept in units of log 2 in the kernels: exp(g) = exp2(g · log₂ e)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaLayout:
    """Where the sequences and states of a call lie for the kernels.

    Args:
        offsets: int32 [N + 1], first token of each sequence, and T.
        chunk_offsets: int32 [N + 1], first chunk of each sequence, and C.
        chunk_indices: int32 [C, 2], sequence and chunk number in it.
        slots: int32 [C], which stored state the chunk ends in, or −1.
        num_slots: U, distinct stored states.
        state_rows: int64 [M], stored state of each returned one.
    """

    offsets: Tensor
    chunk_offsets: Tensor
    chunk_indices: Tensor
    slots: Tensor
    num_slots: int
    state_rows: Tensor


def fla_layout(call: KdaCall, device: torch.device) -> FlaLayout:
    """The layout of ``call``, with its index tensors on ``device``; built once per call and device."""
    return call.cached("fla_layout", device, lambda: _build(call, device))


def _build(call: KdaCall, device: torch.device) -> FlaLayout:
    length_N = torch.tensor(call.lengths, dtype=torch.int64)
    chunks_N = (length_N + call.chunk - 1) // call.chunk
    zero = torch.zeros(1, dtype=torch.int64)
    offsets, chunk_offsets = torch.cat([zero, length_N.cumsum(0)]), torch.cat([zero, chunks_N.cumsum(0)])
    num_chunks = int(chunk_offsets[-1])
    sequence_C = torch.repeat_interleave(torch.arange(call.num_sequences), chunks_N)
    indices_C2 = torch.stack([sequence_C, torch.arange(num_chunks) - chunk_offsets[sequence_C]], dim=1)

    first = chunk_offsets.tolist()
    ends = [first[n] + c - 1 for n, c in call.boundaries] + [first[n + 1] - 1 for n in call.finals]
    unique, state_rows = torch.unique(torch.tensor(ends, dtype=torch.int64), return_inverse=True)
    slots = torch.full((num_chunks,), -1, dtype=torch.int32)
    slots[unique] = torch.arange(len(unique), dtype=torch.int32)
    return FlaLayout(
        offsets=offsets.int().to(device),
        chunk_offsets=chunk_offsets.int().to(device),
        chunk_indices=indices_C2.int().to(device),
        slots=slots.to(device),
        num_slots=len(unique),
        state_rows=state_rows.to(device),
    )


class _ChunkedKda(torch.autograd.Function):
    """(q, k, v, g, β, initial state) -> (o, stored states); at least one token."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        g_THK: Tensor,
        beta_TH: Tensor,
        initial_NHKV: Tensor,
        call: KdaCall,
        layout: FlaLayout,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (x.contiguous().unsqueeze(0) for x in (q_THK, k_THK, v_THV, g_THK, beta_TH))
        initial = initial_NHKV.contiguous()
        packed = _packed(call, layout)
        G = chunk_local_cumsum(g, scale=LOG2_E, chunk_size=call.chunk, **packed)
        w, u, _, decayed_k, Aqk, Akk = chunk_kda_fwd_intra(
            q=q,
            k=k,
            v=v,
            gk=G,
            beta=beta,
            scale=1.0,
            chunk_size=call.chunk,
            safe_gate=_is_safe(call),
            **packed,
        )
        h, new_v, states = _states(decayed_k, w, u, G, initial, call, layout)
        o = chunk_gla_fwd_o_gk(
            q=q,
            v=new_v.unsqueeze(0),
            g=G,
            A=Aqk,
            h=h.unsqueeze(0),
            scale=1.0,
            chunk_size=call.chunk,
            **packed,
        )
        ctx.save_for_backward(q, k, v, G, beta, Aqk, Akk, initial)
        ctx.call, ctx.layout = call, layout
        return o[0], states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: Tensor, dstates_UHKV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, G, beta, Aqk, Akk, initial = ctx.saved_tensors
        call, layout = ctx.call, ctx.layout
        packed = _packed(call, layout)
        do = do_THV.contiguous().unsqueeze(0)
        w, u, decayed_q, decayed_k = recompute_w_u_fwd(q=q, k=k, v=v, beta=beta, A=Akk, gk=G, **packed)
        h, new_v, _ = _states(decayed_k, w, u, G, initial, call, layout)
        h, new_v = h.unsqueeze(0), new_v.unsqueeze(0)
        dAqk, dv_local = chunk_kda_bwd_dAv(
            q=q, k=k, v=new_v, do=do, A=Aqk, scale=1.0, chunk_size=call.chunk, **packed
        )
        dh, dv, dinitial = state_backward(
            decayed_q[0],
            decayed_k[0],
            w[0],
            G[0],
            do[0],
            dv_local[0],
            dstates_UHKV.contiguous(),
            initial,
            chunk=call.chunk,
            **_recurrence(layout),
        )
        dq, dk, dv, dbeta, dG, dAkk = chunk_kda_bwd_wy_dqkg_fused(
            q=q,
            k=k,
            v=v,
            v_new=new_v,
            g=G,
            beta=beta,
            A=Akk,
            h=h,
            do=do,
            dh=dh.unsqueeze(0),
            dv=dv.unsqueeze(0),
            scale=1.0,
            chunk_size=call.chunk,
            **packed,
        )
        dq, dk, dbeta, dG = chunk_kda_bwd_intra(
            q=q,
            k=k,
            g=G,
            beta=beta,
            dAqk=dAqk,
            dAkk=dAkk,
            dq=dq,
            dk=dk,
            db=dbeta,
            dg=dG,
            chunk_size=call.chunk,
            safe_gate=_is_safe(call),
            **packed,
        )
        dg = chunk_local_cumsum(dG, chunk_size=call.chunk, reverse=True, **packed)
        gradients = (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg, dbeta)
        return *(x[0] for x in gradients), dinitial, None, None


def run_kernels(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    initial_NHKV: Tensor,
    call: KdaCall,
) -> tuple[Tensor, Tensor]:
    """``fla.kda_fla`` behind its checks: at least one token, float32 or bfloat16, chunks of 32 or 64."""
    layout = fla_layout(call, q_THK.device)
    o_THV, states_UHKV = cast(
        tuple[Tensor, Tensor],
        _ChunkedKda.apply(  # type: ignore[no-untyped-call]
            q_THK, k_THK, v_THV, g_THK, beta_TH, initial_NHKV, call, layout
        ),
    )
    return o_THV, states_UHKV.index_select(0, layout.state_rows)


def _is_safe(call: KdaCall) -> bool:
    """Whether the gates' bound keeps flash-linear-attention's factors in 16-token blocks inside float32."""
    return call.gate_lower_bound is not None and call.gate_lower_bound >= -5.0


def _states(
    decayed_k: Tensor, w: Tensor, u: Tensor, G: Tensor, initial: Tensor, call: KdaCall, layout: FlaLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """The scan over chunks: what chunks need of it for their outputs, and the requested states."""
    return state_forward(
        decayed_k[0],
        w[0],
        u[0],
        G[0],
        initial,
        num_states=layout.num_slots,
        chunk=call.chunk,
        **_recurrence(layout),
    )


def _packed(call: KdaCall, layout: FlaLayout) -> dict[str, Tensor]:
    return {"cu_seqlens": layout.offsets, "chunk_indices": layout.chunk_indices}


def _recurrence(layout: FlaLayout) -> dict[str, Tensor]:
    return {"offsets": layout.offsets, "chunk_offsets": layout.chunk_offsets, "slots": layout.slots}
