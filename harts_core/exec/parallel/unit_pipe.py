"""What a unit's forward and backward exchange with the neighbouring stages of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from harts_core.exec.layout import UnitLayout

if TYPE_CHECKING:
    from harts_core.exec.model.decoder import HybridModel


class Transfers(Protocol):
    """Values to and from the neighbouring stages; ``like`` has the shape, dtype and device of a value."""

    def receive_activation(self, like: Tensor) -> Tensor:
        """From the stage before."""

    def send_activation(self, value: Tensor) -> None:
        """To the stage after."""

    def receive_gradient(self, like: Tensor) -> Tensor:
        """From the stage after."""

    def send_gradient(self, value: Tensor) -> None:
        """To the stage before."""


class UnitPipe:
    """Holds what has come for a unit until its forward or backward takes it.

    Args:
        model: of this stage.
        transfers: with the neighbours; None: the model is whole.
    """

    def __init__(self, model: HybridModel, transfers: Transfers | None) -> None:
        self.model, self.transfers = model, transfers
        self.is_last = model.spec.stage.is_last
        self._activations: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}

    def receive_activation(self, layout: UnitLayout) -> None:
        """The residual stream of the unit's rows of this rank, from the stage before."""
        device = self.model.device
        rows = len(self.model.spec.local_rows(torch.empty(layout.num_rows, device="meta")))
        like = torch.empty(rows, self.model.config.hidden_size, dtype=self.model.dtype, device=device)
        assert self.transfers is not None
        received = self.transfers.receive_activation(like)
        self._activations[layout.unit] = received.requires_grad_()

    def activation(self, unit: int) -> Tensor | None:
        """What was received for the unit's forward; None on the first stage."""
        return self._activations.pop(unit, None)

    def send_activation(self, hidden: Tensor | None) -> None:
        """The residual stream behind this stage's layers, to the stage after."""
        assert self.transfers is not None
        assert hidden is not None
        self.transfers.send_activation(hidden.detach())

    def receive_gradient(self, unit: int, hidden: Tensor | None) -> None:
        """The gradient of what was sent, from the stage after."""
        assert self.transfers is not None
        assert hidden is not None
        self._gradients[unit] = self.transfers.receive_gradient(hidden.detach())

    def gradient(self, unit: int, hidden: Tensor) -> Tensor:
        """What was received for the unit's backward; zeros on the last stage."""
        received = self._gradients.pop(unit, None)
        return torch.zeros_like(hidden) if received is None else received

    def send_gradient(self, received: Tensor | None) -> None:
        """The gradient of what was received, to the stage before; zeros where nothing depends on it."""
        assert self.transfers is not None
        assert received is not None
        gradient = torch.zeros_like(received) if received.grad is None else received.grad
        self.transfers.send_gradient(gradient)
