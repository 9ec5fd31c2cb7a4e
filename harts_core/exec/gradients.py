"""Where the gradients of a step add up: in this process's own tensors.

``harts_core.exec.parallel.gradients`` has the same for many processes.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    there as it is produced.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            if accumulation_dtype(parameter) != parameter.dtype:
                self._widen(name, parameter)

    def _widen(self, name: str, parameter: nn.Parameter) -> None:
        def collect(source: Tensor) -> None:
            assert source.grad is not None  # called right after it was accumulated
            gradient = source.grad.to(accumulation_dtype(source))
            self._sums[name] = self._sums[name].add_(gradient) if name in self._sums else gradient
            source.grad = None

        parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]

    def zero(self) -> None:
        """See ``Gradients``."""
        self._sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def find(self) -> dict[str, Tensor]:
        """See ``Gradients``."""
        own = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        return own | self._sums

    def get(self, name: str) -> Tensor:
        """See ``Gradients``."""
        parameter = self._parameters[name]
        if accumulation_dtype(parameter) == parameter.dtype:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return parameter.grad
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(parameter, dtype=accumulation_dtype(parameter))
        return self._sums[name]

    def norm(self) -> float:
        """See ``Gradients``."""
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in self.find().values()]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def finish(self) -> float:
        """See ``Gradients``: they are complete."""
        return self.norm()


def accumulation_dtype(parameter: Tensor) -> torch.dtype:
    """Of a parameter's gradient, moments and master copy: float32, or its own where that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)
