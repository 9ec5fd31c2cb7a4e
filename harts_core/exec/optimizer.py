"""AdamW with float32 master weights, gradient accumulation in float32 and a learning-rate schedule.

Written out here rather than taken from ``torch.optim``, whose constructor imports the compiler (seconds at
every start), and so that the whole state is three named tensors per parameter.
``harts_core.exec.parallel.sharded_optimizer`` has the one that shares its state out among many processes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harts_core.errors import NonFiniteError
from harts_core.exec.config import OptimizerSection
from harts_core.exec.gradients import Gradients, LocalGradients, accumulation_dtype


def learning_rate(config: OptimizerSection, step: int) -> float:
    """The learning rate of a step, a pure function of the configuration.

    Linear warmup over ``warmup_steps`` (the first step has learning_rate / warmup_steps), then constant, or
    a linear or cosine decay to ``min_learning_rate`` at ``decay_steps``.

    Args:
        config: the ``[optimizer]`` table.
        step: counted from 0.
    """
    peak, low = config.learning_rate, config.min_learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.decay_steps is None:
        return peak
    done = min(1.0, (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    if config.schedule == "linear":
        return peak + (low - peak) * done
    return low + (peak - low) * (1 + math.cos(math.pi * done)) / 2


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: matrices and embeddings, not norms, biases, ``A_log``, convolutions."""
    return parameter.dim() >= 2 and "conv1d" not in name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateShard:
    """What this process holds of a state tensor.

    Attributes:
        start, stop: elements of the flattened tensor, whose shape is its parameter's on this process.
        values: these elements; a view, which may be written to.
    """

    start: int
    stop: int
    values: Tensor


class StepOptimizer(ABC):
    """AdamW as a training step uses it (Loshchilov & Hutter 2019, algorithm 2).

    Parameters that do not require gradients are left alone; one that got no gradient in a step is updated as
    with a zero gradient. Where the gradients add up and which process holds which part of the state is the
    subclasses' affair.

    Args:
        parameters: of the model, by name, in its order.
        gradients: where theirs add up.
        config: the ``[optimizer]`` table.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], gradients: Gradients, config: OptimizerSection
    ) -> None:
        self.config = config
        self._parameters = parameters
        self._gradients = gradients

    def zero_grad(self) -> None:
        """Forget all accumulated gradients."""
        self._gradients.zero()

    def gradients(self) -> dict[str, Tensor]:
        """This process's accumulated gradients by parameter name, float32 or wider; absent where there is
        none."""
        return self._gradients.find()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that is updated, in the model's order."""
        return iter(self._parameters.items())

    def gradient(self, name: str) -> Tensor:
        """A parameter's gradient, float32 or wider; zeros where there is none. Behind ``finish_gradients``
        the sum over the processes, which all of them must ask for together."""
        return self._gradients.get(name)

    def grad_norm(self) -> float:
        """2-norm of this process's accumulated gradients, in float64; NaN or infinite if one value is."""
        return self._gradients.norm()

    def finish_gradients(self) -> float:
        """Sum the gradients over the processes that share the step; call it once, after the last backward.

        Returns:
            Their global 2-norm over all parameters.
        """
        return self._gradients.finish()

    @torch.no_grad()
    def step(self, step: int, grad_norm: float | None = None) -> float:
        """Clip, update the parameters and forget the gradients.

        Args:
            step: updates made before this one; decides the learning rate and the bias correction.
            grad_norm: what ``finish_gradients`` gave; None in a single process: ``grad_norm()``.

        Returns:
            The learning rate used.

        Raises:
            NonFiniteError: the gradient norm is not finite; nothing is updated.
        """
        norm = self.grad_norm() if grad_norm is None else grad_norm
        if not math.isfinite(norm):
            raise NonFiniteError("the gradient norm is not finite; nothing was updated", where=f"step {step}")
        limit = self.config.max_grad_norm
        scale = limit / norm if 0 < limit < norm else 1.0
        rate = learning_rate(self.config, step)
        self._update(rate, scale, step + 1)
        self.zero_grad()
        return rate

    @abstractmethod
    def _update(self, rate: float, scale: float, count: int) -> None:
        """The ``count``-th update, with the gradients times ``scale``."""

    def state_names(self) -> Iterator[tuple[str, str]]:
        """(kind, parameter name) of all that a bit-exact resume needs besides the model: for every parameter
        ``exp_avg`` and ``exp_avg_sq``, for those below float32 also ``master``."""
        for kind in ("exp_avg", "exp_avg_sq"):
            for name in self._parameters:
                yield kind, name
        for name, parameter in self._parameters.items():
            if accumulation_dtype(parameter) != parameter.dtype:
                yield "master", name

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """``state_names`` as ``kind.name`` with their tensors, each of its parameter's shape; one at a time,
        as a tensor may be put together for it. Processes that share a step iterate together."""
        for kind, name in self.state_names():
            yield f"{kind}.{name}", self._whole_state(kind, name)

    @abstractmethod
    def state_shard(self, kind: str, name: str) -> StateShard:
        """This process's shard of a name of ``state_names``; empty where it holds nothing of it."""

    @abstractmethod
    def _whole_state(self, kind: str, name: str) -> Tensor:
        """The tensor of a name of ``state_names``, of its parameter's shape."""


class Optimizer(StepOptimizer):
    """AdamW with the whole state in this process.

    A parameter below float32 has a float32 master copy; after an update the parameter is the rounded master.

    Args:
        parameters: name and parameter, e.g. ``model.named_parameters()``.
        config: the ``[optimizer]`` table.
        gradients: where they add up; None: in this process.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerSection,
        gradients: Gradients | None = None,
    ) -> None:
        own = {name: p for name, p in parameters if p.requires_grad}
        super().__init__(own, LocalGradients(own) if gradients is None else gradients, config)
        # of a parameter that is wide enough this is the parameter itself
        masters = {name: p.detach().to(accumulation_dtype(p)) for name, p in own.items()}
        self._state = {
            "master": masters,
            "exp_avg": {name: torch.zeros_like(m) for name, m in masters.items()},
            "exp_avg_sq": {name: torch.zeros_like(m) for name, m in masters.items()},
        }

    def _update(self, rate: float, scale: float, count: int) -> None:
        for name, parameter in self._parameters.items():
            self._update_master(name, self._gradients.get(name).mul_(scale), rate, count)
            master = self._state["master"][name]
            if master.dtype != parameter.dtype:
                parameter.copy_(master)

    def _update_master(self, name: str, gradient: Tensor, rate: float, count: int) -> None:
        """p ← p − rate·decay·p − rate·m̂ / (√v̂ + eps), with m̂ and v̂ corrected for ``count`` updates."""
        config = self.config
        master, m, v = (self._state[kind][name] for kind in ("master", "exp_avg", "exp_avg_sq"))
        m.lerp_(gradient, 1 - config.beta1)
        v.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
        if config.weight_decay and decays(name, master):
            master.mul_(1 - rate * config.weight_decay)
        denominator = (v / (1 - config.beta2**count)).sqrt_().add_(config.eps)
        master.addcdiv_(m, denominator, value=-rate / (1 - config.beta1**count))

    def state_shard(self, kind: str, name: str) -> StateShard:
        """All of it."""
        values = self._state[kind][name].view(-1)
        return StateShard(start=0, stop=len(values), values=values)

    def _whole_state(self, kind: str, name: str) -> Tensor:
        return self._state[kind][name]


def parameter_of(state_name: str) -> str:
    """The parameter that an entry of ``StepOptimizer.named_state`` belongs to."""
    return state_name.split(".", 1)[1]
