"""How large the rows are that units hand to later ones, from a model's shape."""

from __future__ import annotations

from harts_core.exec.config import Dtype
from harts_core.exec.model.config import ModelConfig
from harts_core.plan.cache_policy.rows import RowBytes

_WIDTH = {"bfloat16": 2, "float32": 4, "float64": 8}
_STATE_WIDTH = {"bfloat16": 4, "float32": 4, "float64": 8}


def cache_row_bytes(
    config: ModelConfig,
    dtype: Dtype,
    *,
    tensor_parallel: int = 1,
    layers: range | None = None,
    has_head: bool = True,
) -> RowBytes:
    """Bytes of one cached row in each table, all layers together, on one rank.

    A KDA layer keeps the convolutions' inputs (3·H·K), replayed rows (k, v; log gate and β in the state
    dtype) and boundary states (H·K·V in the state dtype); an MLA layer keys and values; the head final hidden
    states. Gradients are gathered in the state dtype.

    Args:
        config: the model.
        dtype: of weights and activations.
        tensor_parallel: ranks that share the heads.
        layers: of this rank's pipeline stage; None: all.
        has_head: whether this rank has the head.
    """
    width, state = _WIDTH[dtype], _STATE_WIDTH[dtype]
    layers = range(config.num_hidden_layers) if layers is None else layers
    mla = sum(config.is_mla(i) for i in layers)
    kda = len(layers) - mla
    hidden = config.hidden_size if has_head else 0
    heads = config.num_attention_heads // tensor_parallel
    channels = heads * config.head_dim
    conv, replay, states = 3 * channels * kda, (3 * channels + heads) * kda, channels * config.head_dim * kda
    keys = heads * (config.qk_head_dim + config.v_head_dim) * mla
    return RowBytes(
        conv=conv * width,
        replay=2 * channels * kda * width + (channels + heads) * kda * state,
        keys=keys * width,
        hidden=hidden * width,
        states=states * state,
        conv_gradient=conv * state,
        replay_gradient=replay * state,
        keys_gradient=keys * state,
        hidden_gradient=hidden * state,
        states_gradient=states * state,
    )
