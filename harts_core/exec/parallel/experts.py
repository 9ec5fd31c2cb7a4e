"""Routed experts split over the expert-parallel ranks: rows travel to the rank of their expert and back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from harts_core.exec.model.config import ModelConfig
from harts_core.exec.model.experts import Experts


class ParallelExperts(Experts):
    """The experts of this rank; every rank of the group calls it together, also with no rows.

    A row's outputs come back to its own rank before they are weighted and summed, so that the sum is taken as
    on one rank.

    Args:
        config: the model's.
        dtype: of the weights.
        group: the ranks that hold the other experts, equally many each.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        super().__init__(config, dtype, config.num_experts // group.size())
        self.group = group

    def apply_experts(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """As ``Experts.apply_experts``, the experts being anywhere in the group."""
        ranks = self.group.size()
        sent = counts_E.view(ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        sent_rows: list[int] = sent.sum(1).tolist()
        received_rows: list[int] = received.sum(1).tolist()
        x = mappings.all_to_all(self.group, x_RD, received_rows, sent_rows)
        # rows lie rank by rank, expert by expert; the experts want theirs together
        expert = torch.arange(sent.shape[1], device=sent.device).repeat(ranks)
        order = torch.argsort(expert.repeat_interleave(received.flatten()), stable=True)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        y = super().apply_experts(x.index_select(0, order), received.sum(0)).index_select(0, back)
        returned: Tensor = mappings.all_to_all(self.group, y, sent_rows, received_rows)
        return returned
