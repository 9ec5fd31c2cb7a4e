"""Megatron-core on machines without CUDA.

Its tensor-parallel mappings allocate on ``torch.cuda.current_device()`` and the group setup calls
``torch.cuda.synchronize()``. Where CUDA is absent both would raise; these two names then mean the CPU.
"""

from __future__ import annotations

import torch


def allow_cpu() -> None:
    """Let Megatron-core's collectives run on CPU tensors; does nothing where CUDA is available."""
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
