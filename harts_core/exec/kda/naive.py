"""The reference: the gated delta rule token by token, in plain differentiable torch.

Slow and obvious. Every other backend is compared with this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts_core.exec.kda.call import KdaCall, prepare_state


def kda_naive(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    call: KdaCall,
    initial_state_NHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of MODEL.md, one token after the other. Arguments and results: ``KdaBackend``.

    Raises:
        ValueError: a shape or dtype does not fit the call.
    """
    initial = prepare_state(q_THK, k_THK, v_THV, g_THK, beta_TH, call, initial_state_NHKV)
    q, k, v = (x.to(initial.dtype) for x in (q_THK, k_THK, v_THV))
    wanted = set(call.boundaries)
    outputs: list[Tensor] = []
    states: dict[tuple[int, int], Tensor] = {}
    finals: list[Tensor] = []
    t = 0
    for n, length in enumerate(call.lengths):
        S_HKV = initial[n]
        for i in range(length):
            S_HKV = g_THK[t].exp()[:, :, None] * S_HKV
            delta_HV = v[t] - torch.einsum("hkv,hk->hv", S_HKV, k[t])
            S_HKV = S_HKV + torch.einsum("h,hk,hv->hkv", beta_TH[t], k[t], delta_HV)
            outputs.append(torch.einsum("hkv,hk->hv", S_HKV, q[t]))
            if (i + 1) % call.chunk == 0 and (n, (i + 1) // call.chunk) in wanted:
                states[n, (i + 1) // call.chunk] = S_HKV
            t += 1
        finals.append(S_HKV)
    returned = [states[b] for b in call.boundaries] + [finals[n] for n in call.finals]
    if outputs:
        o_THV = torch.stack(outputs)
    else:  # a call without tokens keeps its graph: every input has a gradient, on every rank
        o_THV = v * ((q * k * g_THK).sum(-1) * beta_TH)[:, :, None]
    states_MHKV = torch.stack(returned) if returned else initial[:0]
    return o_THV.to(v_THV.dtype), states_MHKV
