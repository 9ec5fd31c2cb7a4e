"""AdamW with float32 master weights, gradient accumulation in float32 and a learning-rate schedule.

Written out here rather than taken from ``torch.optim``, whose constructor imports the compiler (seconds at
every start), and so that the whole state is three named tensors per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from harts_core.errors import DataError, NonFiniteError
from harts_core.exec.config import OptimizerSection


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


class Optimizer:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) over a model's parameters.

    A parameter below float32 has a float32 master copy: its gradients are moved to the master as each
    backward pass produces them, so that microbatches accumulate in float32, and after an update the
    parameter is the rounded master. Parameters that do not require gradients are left alone; one that got
    no gradient in a step is updated as with a zero gradient.

    Args:
        parameters: name and parameter, e.g. ``model.named_parameters()``.
        config: the ``[optimizer]`` table.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerSection) -> None:
        self.config = config
        self._parameters = {name: p for name, p in parameters if p.requires_grad}
        self._masters = {name: _master_of(p) for name, p in self._parameters.items()}
        self._exp_avg = {name: torch.zeros_like(m) for name, m in self._masters.items()}
        self._exp_avg_sq = {name: torch.zeros_like(m) for name, m in self._masters.items()}

    def zero_grad(self) -> None:
        """Forget all accumulated gradients."""
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients by parameter name, float32 or wider; absent where there is none."""
        return {name: m.grad for name, m in self._masters.items() if m.grad is not None}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that is updated, in the model's order."""
        return iter(self._parameters.items())

    def gradient(self, name: str) -> Tensor:
        """A parameter's accumulated gradient, float32 or wider; zeros are made where there is none."""
        master = self._masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def grad_norm(self) -> float:
        """Global 2-norm of the accumulated gradients, summed in float64; NaN or infinite if one value is."""
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in self.gradients().values()]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    @torch.no_grad()
    def step(self, step: int, grad_norm: float | None = None) -> float:
        """Clip, update the parameters and forget the gradients.

        Args:
            step: updates made before this one; decides the learning rate and the bias correction.
            grad_norm: ``grad_norm()``, where the caller has it already.

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
        for name, master in self._masters.items():
            gradient = torch.zeros_like(master) if master.grad is None else master.grad.mul_(scale)
            self._update(name, master, gradient, rate, step + 1)
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)
        self.zero_grad()
        return rate

    def _update(self, name: str, master: Tensor, gradient: Tensor, rate: float, count: int) -> None:
        """p ← p − rate·decay·p − rate·m̂ / (√v̂ + eps), with m̂ and v̂ corrected for ``count`` updates."""
        config = self.config
        m, v = self._exp_avg[name], self._exp_avg_sq[name]
        m.lerp_(gradient, 1 - config.beta1)
        v.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
        if config.weight_decay and decays(name, master):
            master.mul_(1 - rate * config.weight_decay)
        denominator = (v / (1 - config.beta2**count)).sqrt_().add_(config.eps)
        master.addcdiv_(m, denominator, value=-rate / (1 - config.beta1**count))

    def state_tensors(self) -> dict[str, Tensor]:
        """What a bit-exact resume needs besides the model: ``exp_avg.*``, ``exp_avg_sq.*``, ``master.*``."""
        moments = {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        state = {f"{kind}.{name}": t for kind, tensors in moments.items() for name, t in tensors.items()}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                state[f"master.{name}"] = master.detach()
        return state

    def load_state_tensors(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restore ``state_tensors``.

        Raises:
            DataError: a tensor is missing, unexpected, or of another shape or dtype. Nothing was changed.
        """
        state = self.state_tensors()
        odd = sorted(state.keys() ^ tensors.keys())
        if odd:
            raise DataError(f"the optimizer state does not fit the model: {odd[0]}", where=where)
        for name, own in state.items():
            stored = tensors[name]
            if stored.shape != own.shape or stored.dtype != own.dtype:
                raise DataError(
                    f"optimizer state {name} has shape {list(stored.shape)} and dtype {stored.dtype}, "
                    f"not {list(own.shape)} and {own.dtype}",
                    where=where,
                )
        for name, own in state.items():
            own.copy_(tensors[name])


def parameter_of(state_name: str) -> str:
    """The parameter that an entry of ``Optimizer.state_tensors`` belongs to."""
    return state_name.split(".", 1)[1]


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or its float32 master, which then collects its gradients."""
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def collect(source: Tensor) -> None:
        assert source.grad is not None  # called right after it was accumulated
        gradient = source.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        source.grad = None

    parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
    return master
