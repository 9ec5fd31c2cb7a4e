"""Megatron-core on machines without CUDA: everything that it needs to run there.

Its tensor-parallel mappings and gradient buffers allocate on ``torch.cuda.current_device()``, and the group
setup calls ``torch.cuda.synchronize()``: where CUDA is absent both would raise; ``allow_cpu`` makes these two
names mean the CPU, for the process. Its optimizers allocate on ``"cuda"`` and recognise parameters by the
names of CUDA's tensor types: ``cuda_means_cpu`` is put around these calls only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def allow_cpu() -> None:
    """Let Megatron-core's collectives run on CPU tensors; does nothing where CUDA is available."""
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None


@contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """Within the block ``device="cuda"`` allocates on the CPU, and a CPU tensor's ``type()`` is CUDA's name;
    does nothing where CUDA is available."""
    if torch.cuda.is_available():
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
