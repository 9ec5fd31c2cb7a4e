"""Log-probabilities and entropies of the trained positions, never holding C × V or S × V logits.

λ = z[row, label] − logsumexp(z[row, :]) and H = −Σ_v p_v · log p_v with p = softmax(z[row, :]). Logits are
made only for rows that predict a trained position, block by block; the backward pass makes them again. A
(row, label) pair that several trajectories share is computed once, and a row's entropy is.

The vocabulary may be split over tensor-parallel ranks: each makes the logits of its own part, and the ranks
exchange a few numbers per row and label, never logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harts_core.errors import ExecError
from harts_core.exec.kda import state_dtype
from harts_core.exec.layout import DeviceLayout, UnitLayout
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.vocabulary import VocabularyPart

BLOCK_ROWS = 1024
"""Default rows of logits that exist at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutput:
    """What an objective reads of the model's distributions, position by position.

    Attributes:
        logprobs: λ [n] in the state dtype, ordered by (row, position).
        entropy: H [n], nats, of the distribution that each position was predicted from; None: not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None = None


def unit_logprobs(
    model: HybridModel,
    hidden_CH: Tensor,
    layout: UnitLayout | DeviceLayout,
    block_rows: int = BLOCK_ROWS,
    *,
    imported_hidden: Tensor | None = None,
) -> Tensor:
    """λ of every trained position that the unit evaluates: ``unit_head`` without entropies."""
    return unit_head(model, hidden_CH, layout, block_rows, imported_hidden=imported_hidden).logprobs


def unit_head(
    model: HybridModel,
    hidden_CH: Tensor,
    layout: UnitLayout | DeviceLayout,
    block_rows: int = BLOCK_ROWS,
    *,
    imported_hidden: Tensor | None = None,
    entropy: bool = False,
) -> HeadOutput:
    """λ, and H if asked for, of every trained position that the unit evaluates.

    Args:
        model: gives the output matrix.
        hidden_CH: ``unit_hidden``'s result.
        layout: the unit's layout.
        block_rows: rows of logits that exist at a time.
        imported_hidden: final hidden states of the layout's hidden imports, in its order.
        entropy: whether the entropies are needed; they cost one more block of V columns in memory.

    Returns:
        [n] each, in float32 (float64 in a float64 run), ordered by (row, position): ``layout.trained_row``
        and ``layout.trained_index`` say which. Differentiable in the hidden states and the output matrix.

    Raises:
        ExecError: the layout needs other imported hidden states than were given.
    """
    if block_rows < 1:
        raise ValueError(f"block_rows must be at least 1, got {block_rows}")
    device = layout.to(hidden_CH.device)
    num_imported = 0 if imported_hidden is None else len(imported_hidden)
    if num_imported != len(device.layout.imported.hidden):
        raise ExecError(
            f"The unit's head reads {len(device.layout.imported.hidden)} final hidden states of other units, "
            f"but {num_imported} were given.",
            where=f"unit {device.layout.unit}",
        )
    if imported_hidden is not None:
        hidden_CH = torch.cat([hidden_CH, imported_hidden])
    rows = hidden_CH.index_select(0, device.head_rows)
    weight = model.lm_head.weight
    assert isinstance(weight, Tensor)
    part = VocabularyPart(len(weight), model.spec.tensor_group)
    outputs: tuple[Tensor, Tensor | None]
    outputs = _Head.apply(rows, weight, device, block_rows, entropy, part)  # type: ignore[no-untyped-call]
    labels, row_entropy = outputs
    logprobs = labels.index_select(0, device.trained_label)
    if row_entropy is None:
        return HeadOutput(logprobs=logprobs)
    row = device.head_label_row.index_select(0, device.trained_label)
    return HeadOutput(logprobs=logprobs, entropy=row_entropy.index_select(0, row))


class _Head(torch.autograd.Function):
    """hidden [R, D], weight [V, D] → λ of each label [L] and, if asked for, H of each row [R].

    V is this rank's part of the vocabulary; the gradient of ``hidden`` is the part's share of a sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        device: DeviceLayout,
        block_rows: int,
        entropy: bool,
        part: VocabularyPart,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = state_dtype(hidden.dtype)
        lse = hidden.new_empty(len(hidden), dtype=dtype)
        out = hidden.new_empty(len(device.head_labels), dtype=dtype)
        row_entropy = torch.empty_like(lse) if entropy else None
        columns, mine = part.find(device.head_labels)
        for rows, labels in _blocks(device, block_rows):
            logits = (hidden[rows] @ weight.t()).to(dtype)
            lse[rows] = torch.logsumexp(logits, -1)
            local = device.head_label_row[labels] - rows.start
            out[labels] = logits[local, columns[labels]]
            if row_entropy is not None:
                logp = logits.sub_(lse[rows].unsqueeze(-1))
                row_entropy[rows] = -torch.bmm(logp.exp().unsqueeze(1), logp.unsqueeze(2)).flatten()
        picked = out if mine is None else out.mul_(mine)
        lse, row_entropy, picked = part.join(lse, row_entropy, picked)
        ctx.save_for_backward(hidden, weight, lse, row_entropy)
        ctx.device, ctx.block_rows, ctx.part = device, block_rows, part
        return picked.sub_(lse.index_select(0, device.head_label_row)), row_entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """∂λ/∂z = onehot(label) − p and ∂H/∂z = −p · (log p + H).

        So a row's gradient is its labels' minus p · (their sum + g_H · (log p + H)).
        """
        hidden, weight, lse, row_entropy = ctx.saved_tensors
        device: DeviceLayout = ctx.device
        grad = lse.new_zeros(len(device.head_labels)) if grads[0] is None else grads[0]
        columns, mine = ctx.part.find(device.head_labels)
        own_grad = grad if mine is None else grad * mine
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros_like(weight, dtype=lse.dtype)
        for rows, labels in _blocks(device, ctx.block_rows):
            logp = (hidden[rows] @ weight.t()).to(lse.dtype).sub_(lse[rows].unsqueeze(-1))
            local = device.head_label_row[labels] - rows.start
            total = lse.new_zeros(len(logp)).index_add_(0, local, grad[labels])
            slope = None if grads[1] is None else grads[1][rows]
            entropy = None if row_entropy is None else row_entropy[rows]
            dlogits = _softmax_gradient_(logp, total, slope, entropy)
            dlogits.index_put_((local, columns[labels]), own_grad[labels], accumulate=True)
            dlogits = dlogits.to(hidden.dtype)
            torch.mm(dlogits, weight, out=dhidden[rows])
            dweight += dlogits.t() @ hidden[rows]
        return dhidden, dweight.to(weight.dtype), None, None, None, None


def _softmax_gradient_(logp: Tensor, total: Tensor, slope: Tensor | None, entropy: Tensor | None) -> Tensor:
    """−p · (total + slope · (log p + H)) [R, V], in the memory of ``logp``."""
    if slope is None or entropy is None:
        return logp.exp_().mul_(-total.unsqueeze(-1))
    factor = (logp + entropy.unsqueeze(-1)).mul_(-slope.unsqueeze(-1)).sub_(total.unsqueeze(-1))
    return logp.exp_().mul_(factor)


def _blocks(device: DeviceLayout, block_rows: int) -> list[tuple[slice, slice]]:
    """(rows, their labels), block by block."""
    offsets = device.layout.head.label_offsets
    starts = range(0, len(offsets) - 1, block_rows)
    ends = [min(a + block_rows, len(offsets) - 1) for a in starts]
    return [(slice(a, b), slice(int(offsets[a]), int(offsets[b]))) for a, b in zip(starts, ends, strict=True)]
