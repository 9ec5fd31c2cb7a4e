"""Triton kernels for the state recurrence from chunk to chunk, with boundary states as inputs and outputs.

They stand where flash-linear-attention's own state kernels stand in its chunked KDA, and differ in one
thing: the states after requested chunks leave the forward kernel in float32, straight from the
accumulator, and their gradients enter the backward kernel at the chunk where each state arose. Storing
only the requested states matters: at 16 heads of 128 × 128 a float32 state is 1 MiB, and the states
that every chunk needs for its own outputs may stay in the model's dtype.

One program owns one head of one sequence and a block of BV value columns: the columns of a state never
mix, so programs need nothing from each other. All of K lives in one block, hence K ≤ 256.

Gates arrive as flash-linear-attention keeps them: summed from the chunk's start, in units of log 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def state_forward_kernel(
    k: tl.tensor,
    w: tl.tensor,
    u: tl.tensor,
    g: tl.tensor,
    initial: tl.tensor,
    h: tl.tensor,
    v: tl.tensor,
    states: tl.tensor,
    offsets: tl.tensor,
    chunk_offsets: tl.tensor,
    slots: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
) -> None:
    """For every chunk: h ← S; v ← u − w S; S ← 2^g_last ⊙ S + kᵀ v; states[slot] ← S if it has a slot.

    Shapes: k (decayed to the chunk's end), w, g [T, H, K]; u, v [T, H, V]; initial [N, H, K, V]; h [C,
    H, K, V]; states [U, H, K, V]; offsets, chunk_offsets [N + 1]; slots [C] (−1: state not requested).
    """
    col = tl.program_id(0) * BV + tl.arange(0, BV)
    n = tl.program_id(1) // H
    head = tl.program_id(1) % H
    key = tl.arange(0, BK)
    in_key = key < K
    in_col = col < V
    in_state = in_key[:, None] & in_col[None, :]
    state_at = key[:, None] * V + col[None, :]

    first = tl.load(offsets + n).to(tl.int64)
    stop = tl.load(offsets + n + 1).to(tl.int64)
    first_chunk = tl.load(chunk_offsets + n).to(tl.int64)
    num_chunks = tl.load(chunk_offsets + n + 1).to(tl.int64) - first_chunk

    S = tl.load(initial + (n * H + head).to(tl.int64) * K * V + state_at, mask=in_state, other=0.0)
    for i in range(num_chunks):
        chunk = first_chunk + i
        tl.store(h + (chunk * H + head) * K * V + state_at, S.to(h.dtype.element_ty), mask=in_state)

        row = first + i * B + tl.arange(0, B)
        in_row = row < stop
        key_at = (row[:, None] * H + head) * K + key[None, :]
        value_at = (row[:, None] * H + head) * V + col[None, :]
        in_rk = in_row[:, None] & in_key[None, :]
        in_rv = in_row[:, None] & in_col[None, :]
        w_BK = tl.load(w + key_at, mask=in_rk, other=0.0)
        k_BK = tl.load(k + key_at, mask=in_rk, other=0.0)
        v_BV = tl.load(u + value_at, mask=in_rv, other=0.0).to(tl.float32)
        v_BV -= tl.dot(w_BK, S.to(w_BK.dtype), input_precision="tf32x3")
        tl.store(v + value_at, v_BV.to(v.dtype.element_ty), mask=in_rv)

        last = tl.minimum(first + (i + 1) * B, stop) - 1
        g_last = tl.load(g + (last * H + head) * K + key, mask=in_key, other=0.0)
        S = S * tl.exp2(g_last)[:, None]
        S += tl.dot(tl.trans(k_BK), v_BV.to(k_BK.dtype), input_precision="tf32x3")

        slot = tl.load(slots + chunk).to(tl.int64)
        if slot >= 0:
            tl.store(states + (slot * H + head) * K * V + state_at, S, mask=in_state)


@triton.jit
def state_backward_kernel(
    q: tl.tensor,
    k: tl.tensor,
    w: tl.tensor,
    g: tl.tensor,
    do: tl.tensor,
    dv_local: tl.tensor,
    dstates: tl.tensor,
    dh: tl.tensor,
    dv: tl.tensor,
    dinitial: tl.tensor,
    offsets: tl.tensor,
    chunk_offsets: tl.tensor,
    slots: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
) -> None:
    """The reverse recurrence over dS, the gradient of the state after a chunk.

    For every chunk from the last: dS += dstates[slot] where the chunk has a slot; dh ← dS; dv ←
    dv_local + k dS; dS ← 2^g_last ⊙ dS + qᵀ do − wᵀ dv. What remains is the gradient of the initial
    state.

    Shapes as in the forward kernel; q [T, H, K] decayed from the chunk's start; do, dv_local (gradient
    of v through the chunk's own outputs), dv [T, H, V]; dh [C, H, K, V].
    """
    col = tl.program_id(0) * BV + tl.arange(0, BV)
    n = tl.program_id(1) // H
    head = tl.program_id(1) % H
    key = tl.arange(0, BK)
    in_key = key < K
    in_col = col < V
    in_state = in_key[:, None] & in_col[None, :]
    state_at = key[:, None] * V + col[None, :]

    first = tl.load(offsets + n).to(tl.int64)
    stop = tl.load(offsets + n + 1).to(tl.int64)
    first_chunk = tl.load(chunk_offsets + n).to(tl.int64)
    num_chunks = tl.load(chunk_offsets + n + 1).to(tl.int64) - first_chunk

    dS = tl.zeros([BK, BV], dtype=tl.float32)
    for back in range(num_chunks):
        i = num_chunks - 1 - back
        chunk = first_chunk + i
        slot = tl.load(slots + chunk).to(tl.int64)
        if slot >= 0:
            dS += tl.load(dstates + (slot * H + head) * K * V + state_at, mask=in_state, other=0.0)
        tl.store(dh + (chunk * H + head) * K * V + state_at, dS.to(dh.dtype.element_ty), mask=in_state)

        row = first + i * B + tl.arange(0, B)
        in_row = row < stop
        key_at = (row[:, None] * H + head) * K + key[None, :]
        value_at = (row[:, None] * H + head) * V + col[None, :]
        in_rk = in_row[:, None] & in_key[None, :]
        in_rv = in_row[:, None] & in_col[None, :]
        k_BK = tl.load(k + key_at, mask=in_rk, other=0.0)
        w_BK = tl.load(w + key_at, mask=in_rk, other=0.0)
        q_BK = tl.load(q + key_at, mask=in_rk, other=0.0)
        do_BV = tl.load(do + value_at, mask=in_rv, other=0.0)
        dv_BV = tl.load(dv_local + value_at, mask=in_rv, other=0.0).to(tl.float32)
        dv_BV += tl.dot(k_BK, dS.to(k_BK.dtype), input_precision="tf32x3")
        tl.store(dv + value_at, dv_BV.to(dv.dtype.element_ty), mask=in_rv)

        last = tl.minimum(first + (i + 1) * B, stop) - 1
        g_last = tl.load(g + (last * H + head) * K + key, mask=in_key, other=0.0)
        dS = dS * tl.exp2(g_last)[:, None]
        dS += tl.dot(tl.trans(q_BK), do_BV.to(q_BK.dtype), input_precision="tf32x3")
        dS -= tl.dot(tl.trans(w_BK), dv_BV.to(w_BK.dtype), input_precision="tf32x3")
    tl.store(dinitial + (n * H + head).to(tl.int64) * K * V + state_at, dS, mask=in_state)


def block_sizes(K: int, V: int) -> tuple[int, int]:
    """BK and BV of both kernels: all of K, and as many columns as keep a state block in registers.

    Raises:
        ValueError: K is larger than 256.
    """
    if K > 256:
        raise ValueError(f"the state kernels hold all of K in one block and take K up to 256, got {K}")
    BK = max(16, triton.next_power_of_2(K))
    return BK, min(max(16, triton.next_power_of_2(V)), 32 if BK <= 128 else 16)


def launch_options(K: int) -> dict[str, int]:
    """Warps and pipeline stages of both kernels; fixed, so that every launch gives the same bits.

    Four warps keep a bfloat16 state block of K ≤ 128 in registers without spills; above that, a second stage
    would exceed the 227 KiB of shared memory of an sm_90 block in float32.
    """
    return {"num_warps": 4, "num_stages": 2 if K <= 128 else 1}


def state_forward(
    k_THK: Tensor,
    w_THK: Tensor,
    u_THV: Tensor,
    g_THK: Tensor,
    initial_NHKV: Tensor,
    *,
    num_states: int,
    chunk: int,
    offsets: Tensor,
    chunk_offsets: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch ``state_forward_kernel``; returns h [C, H, K, V], v [T, H, V], float32 states [U, H, K, V]."""
    N, H, K, V = initial_NHKV.shape
    h = k_THK.new_empty(slots.shape[0], H, K, V)
    v = torch.empty_like(u_THV)
    states = initial_NHKV.new_empty(num_states, H, K, V)
    BK, BV = block_sizes(K, V)
    state_forward_kernel[(triton.cdiv(V, BV), N * H)](
        k_THK,
        w_THK,
        u_THV,
        g_THK,
        initial_NHKV,
        h,
        v,
        states,
        offsets,
        chunk_offsets,
        slots,
        H=H,
        K=K,
        V=V,
        B=chunk,
        BK=BK,
        BV=BV,
        **launch_options(K),
    )
    return h, v, states


def state_backward(
    q_THK: Tensor,
    k_THK: Tensor,
    w_THK: Tensor,
    g_THK: Tensor,
    do_THV: Tensor,
    dv_local_THV: Tensor,
    dstates_UHKV: Tensor,
    initial_NHKV: Tensor,
    *,
    chunk: int,
    offsets: Tensor,
    chunk_offsets: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch ``state_backward_kernel``; returns dh [C, H, K, V], dv [T, H, V] and dinitial [N, H, K, V]."""
    N, H, K, V = initial_NHKV.shape
    dh = q_THK.new_empty(slots.shape[0], H, K, V)
    dv = torch.empty_like(dv_local_THV)
    dinitial = torch.empty_like(initial_NHKV)
    BK, BV = block_sizes(K, V)
    state_backward_kernel[(triton.cdiv(V, BV), N * H)](
        q_THK,
        k_THK,
        w_THK,
        g_THK,
        do_THV,
        dv_local_THV,
        dstates_UHKV,
        dh,
        dv,
        dinitial,
        offsets,
        chunk_offsets,
        slots,
        H=H,
        K=K,
        V=V,
        B=chunk,
        BK=BK,
        BV=BV,
        **launch_options(K),
    )
    return dh, dv, dinitial
