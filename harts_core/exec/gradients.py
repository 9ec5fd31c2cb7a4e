"""Where the gradients of a step add up: in this process's own tensors.

``harts_core.exec.parallel.gradients`` has the same for many processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn


class Gradients(Protocol):
    """The gradients of a model's parameters, float32 or wider, summed over the backward passes of a step."""

    def zero(self) -> None:
        """Forget all of them."""

    def find(self) -> dict[str, Tensor]:
        """What this process has accumulated, by parameter name; absent where there is none."""

    def get(self, name: str) -> Tensor:
        """A parameter's gradient; zeros are made where there is none."""

    def norm(self) -> float:
        """2-norm of what this process has accumulated, in float64; NaN or infinite if one value is."""

    def finish(self) -> float:
        """Sum over the processes that share the step, once, after the last backward pass.

        Returns:
            The global 2-norm over all parameters, each counted once; the same on every process.
        """


class LocalGradients:
    """Of a single process. Those of parameters below float32 add up in float32: each backward pass's is moved
    there as it is produced. Both kinds hang on the parameter, so several optimizers of a model see the same.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        for parameter in parameters.values():
            if accumulation_dtype(parameter) != parameter.dtype and not hasattr(parameter, _WIDE):
                setattr(parameter, _WIDE, None)
                parameter.register_post_accumulate_grad_hook(_widen)  # type: ignore[no-untyped-call]

    def zero(self) -> None:
        """See ``Gradients``."""
        for parameter in self._parameters.values():
            setattr(parameter, _attribute(parameter), None)

    def find(self) -> dict[str, Tensor]:
        """See ``Gradients``."""
        found = {name: getattr(p, _attribute(p)) for name, p in self._parameters.items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def get(self, name: str) -> Tensor:
        """See ``Gradients``."""
        parameter = self._parameters[name]
        gradient: Tensor | None = getattr(parameter, _attribute(parameter))
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=accumulation_dtype(parameter))
            setattr(parameter, _attribute(parameter), gradient)
        return gradient

    def norm(self) -> float:
        """See ``Gradients``."""
        return norm_of(self.find().values())

    def finish(self) -> float:
        """See ``Gradients``: they are complete."""
        return self.norm()


_WIDE = "wide_grad"


def _attribute(parameter: nn.Parameter) -> str:
    """Where a parameter has its sum: ``grad``, or beside it where that is too narrow."""
    return "grad" if accumulation_dtype(parameter) == parameter.dtype else _WIDE


def _widen(parameter: nn.Parameter) -> None:
    """Move the gradient of a backward pass, which has just been accumulated, to the sum."""
    assert parameter.grad is not None
    gradient = parameter.grad.to(accumulation_dtype(parameter))
    total: Tensor | None = getattr(parameter, _WIDE)
    setattr(parameter, _WIDE, gradient if total is None else total.add_(gradient))
    parameter.grad = None


def norm_of(tensors: Iterable[Tensor]) -> float:
    """2-norm of all values of some tensors, in float64; NaN or infinite if one of them is."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def accumulation_dtype(parameter: Tensor) -> torch.dtype:
    """Of a parameter's gradient, moments and master copy: float32, or its own where that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)
