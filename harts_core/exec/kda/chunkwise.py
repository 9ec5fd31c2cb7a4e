"""The chunkwise backend in torch: all chunks of all sequences at once, sequential only from chunk to chunk.

With G_t the running sum of the log gates in a chunk and S the state before it, unrolling the recurrence gives

    v'_t = β_t (v_t − (e^{G_t} ⊙ k_t)ᵀ S − Σ_{s<t} (Σ_κ k_tκ k_sκ e^{G_tκ − G_sκ}) v'_s)
    o_t  = (e^{G_t} ⊙ q_t)ᵀ S + Σ_{s≤t} (Σ_κ q_tκ k_sκ e^{G_tκ − G_sκ}) v'_s
    S    ← e^{G_B} ⊙ S + Σ_s (e^{G_B − G_s} ⊙ k_s) v'_sᵀ

The first line is a unit lower-triangular system, solved once for both right-hand sides: X = (I + A)⁻¹,
u = X (β v), w = X (β e^G k), so that v' = u − w S is all the scan has to do. Every exponent is ≤ 0
(``decay``).

**Bit invariance.** A chunk's rows depend on nothing but that chunk's own tokens up to the row and the
state before it: chunks are entries of a batch, never blocks of one larger product; rows behind a
sequence's end are zeros, which add exact zeros to the rows before; no reduction runs over the batch. So
the outputs of a token are the same bits whichever sequences share its call, and whether its prefix was
computed here or replayed from a boundary state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts_core.exec.kda.call import KdaCall, prepare_state
from harts_core.exec.kda.chunk_layout import ChunkLayout, chunk_layout
from harts_core.exec.kda.decay import decay_products
from harts_core.exec.kda.dyadic import inverse_unit_lower
from harts_core.exec.kda.scan import chunk_scan


def kda_chunkwise(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    call: KdaCall,
    initial_state_NHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The packed chunkwise form, computed in the state dtype. Arguments and results: ``KdaBackend``.

    Raises:
        ValueError: a shape or dtype does not fit the call.
    """
    initial = prepare_state(q_THK, k_THK, v_THV, g_THK, beta_TH, call, initial_state_NHKV)
    layout = chunk_layout(call, q_THK.device)
    q, k, v, g, beta = (
        _to_chunks(x.to(initial.dtype), layout) for x in (q_THK, k_THK, v_THV, g_THK, beta_TH[..., None])
    )
    weighted_k = beta * k
    P, A, from_start, to_end = decay_products(q, weighted_k, k, g)
    X = inverse_unit_lower(A)
    H = q_THK.shape[1]
    new_v, before, last = chunk_scan(
        torch.bmm(X, beta * v),
        torch.bmm(X, weighted_k * from_start),
        k * to_end,
        from_start[:, -1].unsqueeze(-1),
        initial.index_select(0, layout.sequence_order).flatten(0, 1),
        tuple(size * H for size in layout.step_sizes),
    )
    o = torch.baddbmm(torch.bmm(q * from_start, before), P, new_v)
    o_THV = _from_chunks(o, H, layout)
    states = torch.cat([before, last]).view(-1, *initial.shape[1:]) if call.num_states else initial[:0]
    return o_THV.to(v_THV.dtype), states.index_select(0, layout.state_rows)


def _to_chunks(x_THD: Tensor, layout: ChunkLayout) -> Tensor:
    """Packed rows [T, H, D] to chunk buffers [R, W, D]; rows without a token are zero."""
    H, D = x_THD.shape[1:]
    rows = x_THD.new_zeros(layout.num_chunks * layout.width, H, D).index_copy(0, layout.token_slots, x_THD)
    chunks = rows.view(layout.num_chunks, layout.width, H, D).transpose(1, 2)
    return chunks.contiguous().view(layout.num_chunks * H, layout.width, D)


def _from_chunks(x_RWD: Tensor, H: int, layout: ChunkLayout) -> Tensor:
    """The inverse of ``_to_chunks``."""
    chunks = x_RWD.view(layout.num_chunks, H, layout.width, x_RWD.shape[-1]).transpose(1, 2)
    return chunks.flatten(0, 1).index_select(0, layout.token_slots)
