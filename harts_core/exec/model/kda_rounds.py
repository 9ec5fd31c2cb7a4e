"""The linear-attention calls of a layer: one packed call per round, states handed from round to round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harts_core.exec.kda import KdaBackend

if TYPE_CHECKING:
    from harts_core.exec.layout import DeviceLayout, InitialState
    from harts_core.exec.model.interface import KdaInterface


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaInputs:
    """Per compact token, as the recurrence takes them.

    Attributes:
        q: [C, H, K], unit length, scaled by K^-½.
        k: [C, H, K], unit length.
        v: [C, H, V].
        g: [C, H, K], log gate in the state dtype.
        beta: [C, H], in the state dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def run_rounds(
    backend: KdaBackend,
    inputs: KdaInputs,
    layout: DeviceLayout,
    imports: KdaInterface | None = None,
    *,
    gate_lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run every round of a unit.

    A sequence first replays its ancestors from the chunk boundary before it: their keys, values, gates and β
    are gathered (they are computed once, with their own row), their queries are zero, their outputs dropped.

    Args:
        backend: runs a call.
        inputs: of the unit's own tokens.
        layout: the unit's layout.
        imports: rows and states of other units.
        gate_lower_bound: below all log gates, where they are bounded; see ``KdaCall``.

    Returns:
        o_CHV in memory order, and all returned states [slots, H, K, V].
    """
    packed = _pack(inputs, layout, imports)
    rounds = layout.layout.rounds
    sizes = [r.call.num_tokens for r in rounds]
    parts = zip(*(torch.split(tensor, sizes) for tensor in packed), strict=True)
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for entry, initial, (q, k, v, g, beta) in zip(rounds, layout.initial_states, parts, strict=True):
        start = None if initial is None else _gather_states(initial, states, imports)
        o, returned = backend(q, k, v, g, beta, entry.call.with_gate_bound(gate_lower_bound), start)
        outputs.append(o)
        states.append(returned)
    if not outputs:
        H, K, V = *inputs.q.shape[1:], inputs.v.shape[-1]
        return inputs.v.new_empty(0, H, V), inputs.g.new_empty(0, H, K, V)
    o_PHV = torch.cat(outputs)
    if len(layout.packed_rows) != len(layout.packed_own):
        o_PHV = o_PHV.index_select(0, layout.packed_own)
    return o_PHV, torch.cat(states)


def _pack(inputs: KdaInputs, layout: DeviceLayout, imports: KdaInterface | None) -> tuple[Tensor, ...]:
    """q, k, v, g, β of the packed tokens of all rounds, in one gather for all of them."""
    rest = (inputs.k, inputs.v, inputs.g, inputs.beta)
    if len(layout.packed_rows) == len(layout.packed_own):
        return inputs.q, *rest  # nothing is replayed: memory order is packed order
    if imports is not None:
        rest = tuple(torch.cat(pair) for pair in zip(rest, imports.replay, strict=True))  # type: ignore[assignment]
    q = inputs.q.new_zeros(len(layout.packed_rows), *inputs.q.shape[1:])
    q = q.index_copy(0, layout.packed_own, inputs.q)
    return q, *(x.index_select(0, layout.packed_rows) for x in rest)


def _gather_states(initial: InitialState, states: list[Tensor], imports: KdaInterface | None) -> Tensor:
    """[N, H, K, V], each sequence's first state out of earlier rounds' states, imported ones and zeros."""
    parts = []
    for source, index in initial.pieces:
        table = states[source] if imports is None or source >= 0 else imports.states
        parts.append(table.index_select(0, index))
    if initial.num_zeros:
        parts.append(parts[0].new_zeros(initial.num_zeros, *parts[0].shape[1:]))
    return torch.cat(parts).index_select(0, initial.order)
