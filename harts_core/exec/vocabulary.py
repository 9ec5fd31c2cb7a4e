"""The part of the vocabulary that a rank holds, and what the ranks exchange instead of logits.

With z the logits of a row, split over the ranks, and lse_r, H_r the log-normaliser and entropy of rank r's
part alone: lse = logsumexp_r(lse_r), and with w_r = exp(lse_r − lse), H = Σ_r w_r · (H_r − log w_r), the
chain rule of entropy. A label's logit is on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """An equal part of the vocabulary.

    Attributes:
        size: tokens of the part.
        group: the ranks that hold the parts, in order; None: one part.
    """

    size: int
    group: dist.ProcessGroup | None = None

    def find(self, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Columns of the part for token ids [L], and which of them are in it (None: all)."""
        if self.group is None:
            return labels, None
        column = labels - self.group.rank() * self.size
        return column.clamp(0, self.size - 1), (column >= 0) & (column < self.size)

    def join(
        self, lse: Tensor, entropy: Tensor | None, picked: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of the whole vocabulary, the same on every rank.

        Args:
            lse: [R], log-normalisers of the part.
            entropy: [R], of the part's own distribution; or None.
            picked: [L], logits of the labels, 0 where another rank has them.
        """
        if self.group is None:
            return lse, entropy, picked
        dist.all_reduce(picked, group=self.group)
        mine = torch.stack([lse] if entropy is None else [lse, entropy])
        parts = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(parts, mine, group=self.group)
        values = torch.stack(parts)
        whole = torch.logsumexp(values[:, 0], 0)
        if entropy is None:
            return whole, None, picked
        log_weight = values[:, 0] - whole
        return whole, (log_weight.exp() * (values[:, 1] - log_weight)).sum(0), picked
