"""Activations and gradients between neighbouring pipeline stages.

Each pair of neighbours has one process group for activations and one for gradients, so that a transfer that
waits never holds up another. Sends return at once; what they send is kept until it has arrived. Shapes come
from the plan: nothing but the values is sent.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from harts_core.exec.parallel.groups import Groups


class StageTransfers:
    """Transfers of one rank (``Transfers``).

    Args:
        groups: of this process.
    """

    def __init__(self, groups: Groups) -> None:
        width = groups.parallel.dp * groups.parallel.tp
        self.groups = groups
        self.before, self.after = groups.rank - width, groups.rank + width
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def receive_activation(self, like: Tensor) -> Tensor:
        """From the stage before."""
        return self._receive(like, self.before, self.groups.activations[-1])

    def send_activation(self, value: Tensor) -> None:
        """To the stage after."""
        self._send(value, self.after, self.groups.activations[1])

    def receive_gradient(self, like: Tensor) -> Tensor:
        """From the stage after."""
        return self._receive(like, self.after, self.groups.gradients[1])

    def send_gradient(self, value: Tensor) -> None:
        """To the stage before."""
        self._send(value, self.before, self.groups.gradients[-1])

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _receive(self, like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
        value = torch.empty_like(like)
        if value.numel():
            dist.recv(value, source, group=group)
        return value

    def _send(self, value: Tensor, target: int, group: dist.ProcessGroup) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        if value.numel():
            value = value.detach().contiguous()
            work = dist.isend(value, target, group=group)
            assert work is not None  # both ranks are in the group
            self._sent.append((work, value))
