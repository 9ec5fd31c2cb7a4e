"""Megatron-core in jobs on the CPU: everything that it needs to run there.

Its tensor-parallel mappings and gradient buffers allocate on ``torch.cuda.current_device()``, the group setup
calls ``torch.cuda.synchronize()``, and the all-to-all token dispatcher copies its counts to the host on a
stream of its own: without CUDA all of these would raise, and with it mix the devices; ``allow_cpu`` makes the
names mean the CPU, which does everything in order, for the process. Its optimizers allocate on ``"cuda"`` and
recognise parameters by the names of CUDA's tensor types: ``cuda_means_cpu`` is put around these calls only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def allow_cpu() -> None:
    """Let Megatron-core's collectives run on CPU tensors; not for a process that uses CUDA."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: _IN_ORDER  # type: ignore[assignment,return-value]
    torch.cuda.Stream = lambda: _IN_ORDER  # type: ignore[assignment,misc]
    torch.cuda.stream = _use  # type: ignore[assignment]


class _InOrder:
    """A stream that has always done everything, and an event on it."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self) -> _InOrder:
        """Already over."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


_IN_ORDER = _InOrder()


def _use(stream: Any) -> AbstractContextManager[None]:
    """``torch.cuda.stream`` as a context."""
    return nullcontext()


@contextmanager
def cuda_means_cpu(device: torch.device) -> Iterator[None]:
    """Within the block ``device="cuda"`` allocates on the CPU, and a CPU tensor's ``type()`` is CUDA's name.

    Args:
        device: of the job; does nothing for CUDA.
    """
    if device.type == "cuda":
        yield
        return
    with _CudaMeansCpu():
        yield


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = CPU
        found = func(*args, **named)
        if func is Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found
