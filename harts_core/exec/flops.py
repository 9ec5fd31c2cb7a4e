"""Floating-point operations of a unit, counted exactly from its layout.

A plan's speed is bounded by the operations that it needs: what ``expanded`` computes over what the plan
computes. Counted are the forward's matrix products (2 operations per multiply-add); a backward has twice as
many in every part, so ratios of training steps are those of the forwards. Chunks count with the tokens that
they hold and causal pairs once: padding and masked halves that an implementation computes are its loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from harts_core.exec.layout import UnitLayout
from harts_core.exec.model.config import ModelConfig
from harts_core.plan.recompute import Recompute, recomputes_layers
from harts_core.plan.schedule.units import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFlops:
    """Operations of a forward, by part.

    Attributes:
        projection: all linear maps of the two kinds of attention layers.
        linear_attention: the packed chunkwise calls, replayed tokens included.
        attention: scores and weighted values of every causal pair.
        ffn: dense layers, routers, routed and shared experts.
        head: logits of the rows that predict a trained position.
    """

    projection: float = 0.0
    linear_attention: float = 0.0
    attention: float = 0.0
    ffn: float = 0.0
    head: float = 0.0

    @property
    def total(self) -> float:
        """All parts."""
        return sum(float(getattr(self, f.name)) for f in fields(self))

    def __add__(self, other: UnitFlops) -> UnitFlops:
        return UnitFlops(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def unit_flops(config: ModelConfig, layout: UnitLayout) -> UnitFlops:
    """Operations of one unit's forward and log-probabilities."""
    num_mla = sum(config.is_mla(i) for i in range(config.num_hidden_layers))
    num_kda = config.num_hidden_layers - num_mla
    weights = num_kda * kda_weights(config) + num_mla * mla_weights(config)
    pair = 2 * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    ffn = sum(_ffn_weights(config, i) for i in range(config.num_hidden_layers))
    return UnitFlops(
        projection=2.0 * weights * layout.num_rows,
        linear_attention=float(num_kda * config.num_attention_heads * _chunkwise(config.head_dim, layout)),
        attention=float(num_mla * pair * causal_pairs(layout)),
        ffn=2.0 * ffn * layout.num_rows,
        head=2.0 * len(layout.head.rows) * config.hidden_size * config.vocab_size,
    )


def step_flops(
    units: Mapping[int, UnitFlops], events: Iterable[Event], recompute: Recompute = "none"
) -> UnitFlops:
    """Operations of a training step as it runs, recomputation included.

    A forward that will be run again makes no logits; a backward that runs layers again makes them once.

    Args:
        units: ``unit_flops`` of each unit.
        events: what runs, second forwards included (``with_second_forwards``).
        recompute: of layers.
    """
    events = tuple(events)
    second = {event.unit for event in events if event.kind == "recompute"}
    total = UnitFlops()
    for event in events:
        if event.kind not in ("forward", "recompute", "backward"):
            continue
        whole = units[event.unit]
        layers = replace(whole, head=0.0)
        if event.kind == "backward":
            total = total + whole + whole
            if recomputes_layers(recompute):
                total += layers
        else:
            total += layers if event.kind == "forward" and event.unit in second else whole
    return total


def causal_pairs(layout: UnitLayout) -> int:
    """(query, key) pairs of a unit's own queries: every token with its ancestors and itself."""
    pairs = 0
    for span in layout.attention:
        own = span.stop - span.start
        before = sum(stop - start for start, stop in span.ancestors)
        pairs += own * before + own * (own + 1) // 2
    return pairs


def kda_weights(config: ModelConfig) -> int:
    """Matrix entries of a KDA layer: q, k, v, f, g and output matrices, and β's."""
    width = config.num_attention_heads * config.head_dim
    return config.hidden_size * (6 * width + config.num_attention_heads)


def mla_weights(config: ModelConfig) -> int:
    """Matrix entries of an MLA layer: queries, keys and values, gates and output."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query = heads * config.qk_head_dim
    rank = config.q_lora_rank
    queries = hidden * query if rank is None else rank * (hidden + query)
    keys_values = hidden * (latent + config.qk_rope_head_dim)
    expanded = latent * heads * (config.qk_nope_head_dim + config.v_head_dim)
    return queries + keys_values + expanded + hidden * heads + heads * config.v_head_dim * hidden


def _ffn_weights(config: ModelConfig, layer: int) -> int:
    """Weights that one token meets."""
    if not config.is_moe(layer):
        return 3 * config.hidden_size * config.intermediate_size
    experts = config.num_experts_per_tok + config.num_shared_experts
    return config.hidden_size * (config.num_experts + 3 * experts * config.moe_intermediate_size)


def _chunkwise(K: int, layout: UnitLayout) -> int:
    """One head's operations in all packed calls (the formulas of ``harts_core.exec.kda.chunkwise``, V = K).

    Per chunk of n tokens: two triangles of decayed products, the inverse's n³/3, the inverse times two
    right-hand sides, the triangle times the new values, and three products with the state.
    """
    total = 0
    for entry in layout.rounds:
        length, chunk = np.array(entry.call.lengths, np.int64), entry.call.chunk
        for n, count in ((chunk, int((length // chunk).sum())), *((int(r), 1) for r in length % chunk)):
            triangles = 2 * K * (n * n + 3 * n * (n + 1) // 2)
            total += count * (triangles + n**3 // 3 + 6 * n * K * K)
    return total
