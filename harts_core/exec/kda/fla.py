"""The GPU backend: flash-linear-attention's chunk kernels and HARTS's own state kernels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import torch
from torch import Tensor

from harts_core.errors import ExecError, MissingBackendError
from harts_core.exec.kda.call import KdaCall, prepare_state
from harts_core.exec.kda.chunkwise import kda_chunkwise

MINIMUM_FLA = (0, 6, 0)
"""Earlier versions let gates of later tokens leak into a chunk's scores by rounding."""

CHUNKS = (32, 64)
"""Chunk lengths that flash-linear-attention's kernels are written for."""


def require_fla() -> None:
    """Check that the ``fla`` backend can run here.

    Raises:
        MissingBackendError: triton, flash-linear-attention (at least 0.6.0) or a CUDA device is absent. With
            TRITON_INTERPRET=1 the kernels run on the CPU, slowly, for tests.
    """
    if importlib.util.find_spec("triton") is None:
        raise MissingBackendError(
            "The KDA backend 'fla' needs triton, which is not installed.",
            hint='pip install triton, or choose runtime.backend = "torch".',
        )
    try:
        version = importlib.metadata.version("flash-linear-attention")
    except importlib.metadata.PackageNotFoundError:
        raise MissingBackendError(
            "The KDA backend 'fla' needs flash-linear-attention, which is not installed.",
            hint="pip install 'flash-linear-attention>=0.6.0', or choose runtime.backend = \"torch\".",
        ) from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < MINIMUM_FLA:
        raise MissingBackendError(
            f"The KDA backend 'fla' needs flash-linear-attention 0.6.0 or newer, found {version}.",
            hint="pip install --upgrade 'flash-linear-attention>=0.6.0'.",
        )
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise MissingBackendError(
            "The KDA backend 'fla' needs a CUDA device, and torch sees none.",
            hint='Choose runtime.backend = "torch" on this machine.',
        )


def kda_fla(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    call: KdaCall,
    initial_state_NHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The chunkwise form in Triton kernels. Arguments and results: ``KdaBackend``; no float64.

    Gates that the call bounds below by −5 or more (``gate_lower_bound``) run on tensor cores throughout.

    Raises:
        ExecError: the chunk length or dtype is none that the kernels take.
        MissingBackendError: a package or device is absent.
        ValueError: a shape or dtype does not fit the call.
    """
    initial = prepare_state(q_THK, k_THK, v_THV, g_THK, beta_TH, call, initial_state_NHKV)
    require_fla()
    if call.chunk not in CHUNKS:
        raise ExecError(
            f"The KDA backend 'fla' takes chunks of 32 or 64 tokens, got {call.chunk}.",
            hint='Plan with --chunk 64, or choose runtime.backend = "torch".',
        )
    if initial.dtype == torch.float64:
        raise ExecError(
            "The KDA backend 'fla' computes in float32 and bfloat16 only, got float64.",
            hint='Choose runtime.backend = "torch" for float64 runs.',
        )
    if call.num_tokens == 0:  # no kernel to launch; the graph stays connected
        return kda_chunkwise(q_THK, k_THK, v_THV, g_THK, beta_TH, call, initial)
    from harts_core.exec.kda.fla_chunk import run_kernels

    return run_kernels(q_THK, k_THK, v_THV, g_THK, beta_TH, initial, call)
