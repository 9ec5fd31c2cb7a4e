"""KDA linear attention over packed sequences, with differentiable boundary states.

``naive`` is the token-by-token reference, ``torch`` the chunkwise form on any device, ``fla`` the Triton
kernels on a GPU.
"""

from __future__ import annotations

from harts_core.errors import ConfigError
from harts_core.exec.kda.call import KdaBackend, KdaCall, state_dtype
from harts_core.exec.kda.chunkwise import kda_chunkwise
from harts_core.exec.kda.fla import kda_fla, require_fla
from harts_core.exec.kda.naive import kda_naive

KDA_BACKENDS: dict[str, KdaBackend] = {
    "naive": kda_naive,
    "torch": kda_chunkwise,
    "fla": kda_fla,
}


def get_kda_backend(name: str) -> KdaBackend:
    """The backend of that name.

    Raises:
        ConfigError: no backend has that name.
        MissingBackendError: the backend's package or device is absent.
    """
    if name not in KDA_BACKENDS:
        raise ConfigError(
            f"Unknown KDA backend {name!r}.",
            where="runtime.backend",
            hint=f"Choose one of: {', '.join(KDA_BACKENDS)}.",
        )
    if name == "fla":
        require_fla()
    return KDA_BACKENDS[name]


__all__ = [
    "KDA_BACKENDS",
    "KdaBackend",
    "KdaCall",
    "get_kda_backend",
    "kda_chunkwise",
    "kda_fla",
    "kda_naive",
    "state_dtype",
]
