"""Where every token and every state of a packed call lies in the chunk buffers.

The chunkwise backend works on buffers [R, W, ·], R = C · H: C chunks, each of W rows, W the smallest power of
two that holds the chunk length B. Chunks are in step-major order, longest sequence first: step i of the
scan holds chunk i of every sequence that has one, so each step is one slice of every buffer, and a scan
over sequences of different lengths costs no masks and no indexing. Rows that hold no token are all zero:
they leave the state as it is and add exact zeros to the rows of real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harts_core.exec.kda.call import KdaCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """The chunk buffers of one call.

    Args:
        width: W, rows per chunk.
        num_chunks: C.
        step_sizes: sequences that take part in each step of the scan, falling.
        token_slots: int64 [T], row of each token in a buffer flattened to [C · W].
        sequence_order: int64 [N], sequences by rank: most chunks first, ties in call order.
        state_rows: int64 [M], where each returned state lies in cat([states before each chunk [C],
            states after the last chunk of each sequence [N, by rank]]).
    """

    width: int
    num_chunks: int
    step_sizes: tuple[int, ...]
    token_slots: Tensor
    sequence_order: Tensor
    state_rows: Tensor


def chunk_layout(call: KdaCall, device: torch.device) -> ChunkLayout:
    """The layout of ``call``, with its index tensors on ``device``; built once per call and device."""
    return call.cached("chunk_layout", device, lambda: _build(call, device))


def _build(call: KdaCall, device: torch.device) -> ChunkLayout:
    B = call.chunk
    width = 1 << (B - 1).bit_length()
    length_N = torch.tensor(call.lengths, dtype=torch.int64)
    chunks_N = (length_N + B - 1) // B
    order_N = torch.argsort(chunks_N, descending=True, stable=True)
    rank_N = torch.argsort(order_N)

    num_steps = int(chunks_N.max()) if call.num_sequences else 0
    # bincount[c] sequences end with step c - 1; those with more than i chunks take part in step i
    ends = torch.bincount(chunks_N, minlength=num_steps + 1)
    step_sizes_I = call.num_sequences - ends.cumsum(0)[:num_steps]
    step_start_I = step_sizes_I.cumsum(0) - step_sizes_I
    num_chunks = int(step_sizes_I.sum())

    sequence_T = torch.repeat_interleave(torch.arange(call.num_sequences), length_N)
    offset_T = torch.arange(call.num_tokens) - (length_N.cumsum(0) - length_N)[sequence_T]
    chunk_T = step_start_I[offset_T // B] + rank_N[sequence_T]
    slot_T = chunk_T * width + offset_T % B

    def after(n: int, c: int) -> int:
        """The state after c chunks is the state before the next chunk, if the sequence has one."""
        rank = int(rank_N[n])
        return int(step_start_I[c]) + rank if c < int(chunks_N[n]) else num_chunks + rank

    states = [after(n, c) for n, c in call.boundaries] + [after(n, int(chunks_N[n])) for n in call.finals]
    return ChunkLayout(
        width=width,
        num_chunks=num_chunks,
        step_sizes=tuple(step_sizes_I.tolist()),
        token_slots=slot_T.to(device),
        sequence_order=order_N.to(device),
        state_rows=torch.tensor(states, dtype=torch.int64, device=device),
    )
