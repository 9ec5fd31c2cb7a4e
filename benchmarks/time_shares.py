"""Where a training step's time goes, by part of the model, forward and backward.

The profiler times every operator; the part is that of the innermost scope around it. Scopes come from module
hooks in the forward; an operator of the backward belongs to the part whose forward made its autograd node
(both carry the same sequence number).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from harts_core.exec.model.kda_layer import KdaAttention
from harts_core.exec.model.mla_layer import MlaAttention
from harts_core.exec.model.mlp import SwiGLU
from harts_core.exec.model.moe import MoE
from harts_core.exec.model.short_conv import ShortConv
from harts_core.exec.model.spec import Linear
from harts_core.exec.trainer import Trainer

PREFIX = "part: "
PARTS = (
    "projection",
    "state rounds",
    "convolution",
    "gather and gates",
    "attention",
    "ffn",
    "norms and residuals",
    "head and loss",
    "optimizer",
)


def time_shares(trainer: Trainer, run: Callable[[], Any]) -> dict[str, float]:
    """Share of each part in the CPU time of ``run``, which uses the trainer.

    ``projection``: linear maps of both kinds of attention; ``state rounds``: packed linear-attention calls;
    ``gather and gates``: packing and replay gathers, states, norms and gates around them; ``attention``:
    rotary, gathered keys and values, and the causal blocks; ``head and loss``: all that is outside the
    decoder, but for the gradient norm and the update.
    """
    with _scopes(trainer), profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    seconds: dict[str, float] = defaultdict(float)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    made_by: dict[int, str] = {}
    parts: dict[int, str] = {}
    for event in events:  # parents start before their children
        parent = event.cpu_parent
        part = parts.get(id(parent), "head and loss")
        if event.name.startswith(PREFIX):
            part = event.name.removeprefix(PREFIX)
        elif event.name.startswith("autograd::engine::evaluate_function"):
            part = made_by.get(event.sequence_nr, "optimizer")  # no node made it: gradients are stored
        elif event.sequence_nr >= 0 and "Backward" not in event.name:
            made_by[event.sequence_nr] = part  # the last with this number made the node
        parts[id(event)] = part
        seconds[part] += event.self_cpu_time_total
    total = sum(seconds.values())
    return {part: seconds[part] / total for part in PARTS}


def _part_of(module: nn.Module, inside: str) -> str | None:
    """The part that a module is; ``inside``: that of the module around it."""
    if isinstance(module, KdaAttention):
        return "gather and gates"
    if isinstance(module, MlaAttention):
        return "attention"
    if isinstance(module, SwiGLU | MoE):
        return "ffn"
    if isinstance(module, ShortConv):
        return "convolution"
    if isinstance(module, Linear) and inside in ("gather and gates", "attention"):
        return "projection"
    return None


@contextmanager
def _scopes(trainer: Trainer) -> Iterator[None]:
    """Scopes around every part of the trainer's model and around the optimizer's work."""
    with ExitStack() as stack:

        def hook(module: nn.Module, part: str) -> None:
            opened: list[record_function] = []

            def enter(*_: Any) -> None:
                opened.append(record_function(PREFIX + part))
                opened[-1].__enter__()

            def leave(*_: Any) -> None:
                opened.pop().__exit__(None, None, None)

            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)

        def walk(module: nn.Module, inside: str) -> None:
            part = _part_of(module, inside)
            if part is not None:
                hook(module, part)
            if isinstance(module, KdaAttention):
                stack.callback(setattr, module, "backend", module.backend)
                module.backend = _scoped(module.backend, "state rounds")
            for child in module.children():
                walk(child, part or inside)

        hook(trainer.model, "norms and residuals")
        walk(trainer.model, "")
        for name in ("step", "grad_norm"):
            method = getattr(trainer.optimizer, name)
            stack.callback(delattr, trainer.optimizer, name)
            setattr(trainer.optimizer, name, _scoped(method, "optimizer"))
        yield


def _scoped(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + part):
            return function(*args, **kwargs)

    return run
