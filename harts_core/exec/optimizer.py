"""AdamW with float32 master weights, gradient accumulation in float32 and a learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from harts_core.errors import DataError, NonFiniteError
from harts_core.exec.config import OptimizerSection

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter, by torch's names; ``step`` counts its updates."""


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
    """AdamW over a model's parameters.

    A parameter below float32 has a float32 master copy: its gradients are moved to the master as each
    backward pass produces them, so that microbatches accumulate in float32, and after an update the
    parameter is the rounded master. Parameters that do not require gradients are left alone.

    Args:
        parameters: name and parameter, e.g. ``model.named_parameters()``.
        config: the ``[optimizer]`` table.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerSection) -> None:
        self.config = config
        self._parameters = {name: p for name, p in parameters if p.requires_grad}
        self._masters = {name: _master_of(p) for name, p in self._parameters.items()}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, master in self._masters.items():
            groups[decays(name, master)].append(master)
        self._adamw = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": config.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )

    def zero_grad(self) -> None:
        """Forget all accumulated gradients."""
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients by parameter name, float32 or wider; absent where there is none."""
        return {name: m.grad for name, m in self._masters.items() if m.grad is not None}

    def grad_norm(self) -> float:
        """Global 2-norm of the accumulated gradients, summed in float64; NaN or infinite if one value is."""
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in self.gradients().values()]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def step(self, step: int, grad_norm: float | None = None) -> float:
        """Clip, update the parameters and forget the gradients.

        Args:
            step: counted from 0; decides the learning rate.
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
        if 0 < limit < norm:
            for gradient in self.gradients().values():
                gradient.mul_(limit / norm)
        rate = learning_rate(self.config, step)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)
        self.zero_grad()
        return rate

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a bit-exact resume needs, as flat tensors: moments and, where kept, master weights."""
        return dict(self._named_state())

    def load_state_tensors(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restore ``state_tensors``.

        Raises:
            DataError: a tensor is missing, unexpected, or of another shape or dtype. Nothing was changed.
        """
        masters: dict[str, Tensor] = {
            f"master.{name}": master
            for name, master in self._masters.items()
            if master is not self._parameters[name]
        }
        expected = dict(masters)
        for name, master in self._masters.items():
            expected |= {f"exp_avg.{name}": master, f"exp_avg_sq.{name}": master}
            expected[f"step.{name}"] = torch.zeros(())
        # before a parameter's first update AdamW has no state for it
        missing = [name for name in masters if name not in tensors]
        unexpected = [name for name in tensors if name not in expected]
        if missing or unexpected:
            raise DataError(
                f"the optimizer state does not fit the model: {(missing + unexpected)[0]}", where=where
            )
        for name, tensor in tensors.items():
            if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
                raise DataError(
                    f"optimizer state {name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, "
                    f"not {list(expected[name].shape)} and {expected[name].dtype}",
                    where=where,
                )
        with torch.no_grad():
            for name, kept in masters.items():
                kept.copy_(tensors[name])
        for name, master in self._masters.items():
            state = {m: tensors[f"{m}.{name}"].clone() for m in MOMENTS if f"{m}.{name}" in tensors}
            if state:
                moved = {k: v if k == "step" else v.to(master.device) for k, v in state.items()}
                self._adamw.state[master] = moved

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._masters.items():
            for moment in MOMENTS:
                if moment in self._adamw.state[master]:
                    yield f"{moment}.{name}", self._adamw.state[master][moment]
            if master is not self._parameters[name]:
                yield f"master.{name}", master.detach()


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
