"""The shape of a model: the keys of a ``bailing_hybrid`` config.json that matter to the computation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from harts_core.errors import ConfigError

MODEL_TYPE = "bailing_hybrid"
CONV_WIDTH = 4
"""Width of the short convolution; the layouts hold CONV_WIDTH − 1 ancestors of a token."""

ALIASES = {
    "num_local_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "n_shared_experts": "num_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "linear_head_dim": "head_dim",
}
"""Other spellings of the same key (transformers writes some of them); read, never written."""

MAX_LAYERS = 10_000
MAX_WIDTH = 2**31 - 1
"""Sizes beyond which a number is a slip of the pen."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": (MODEL_TYPE,),
    "hidden_act": ("silu",),
    "short_conv_kernel_size": (CONV_WIDTH,),
    "linear_conv_kernel_dim": (CONV_WIDTH,),
    "attention_bias": (False,),
    "use_bias": (False,),
    "use_qkv_bias": (False,),
    "tie_word_embeddings": (False,),
    "attention_dropout": (0, None),
    "embedding_dropout": (0, None),
    "hidden_dropout": (0, None),
    "output_dropout": (0, None),
    "rope_scaling": (None,),
    "rope_interleave": (True,),
    "sliding_window": (None,),
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "pretraining_tp": (1, None),
    # no token is ever dropped
    "moe_expert_capacity_factor": (None,),
    "moe_token_drop_policy": (None,),
    "moe_pad_expert_input_to_capacity": (False, None),
    "capacity_factor": (None,),
    "expert_capacity": (None,),
    "drop_tokens": (False, None),
}
"""Keys that would change the computation if they had another value than these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that the layers need; the names are those on disk.

    Attributes:
        vocab_size: token ids are in [0, vocab_size).
        hidden_size: width of the residual stream.
        intermediate_size: width of the dense feed-forward layers.
        num_hidden_layers: decoder layers.
        layer_group_size: the last layer of each group is MLA, the others KDA.
        num_attention_heads: heads of both kinds of attention.
        head_dim: key and value width of a KDA head.
        q_lora_rank: rank of the MLA query projection; None: one full projection.
        kv_lora_rank: width of the MLA key/value latent.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: widths of an MLA head.
        rope_theta: base of the rotary frequencies.
        first_k_dense_replace: leading layers with a dense feed-forward; the rest have experts.
        moe_intermediate_size: width of one expert.
        num_experts, num_experts_per_tok: routed experts, and how many a token uses.
        num_shared_experts: experts that every token uses (one feed-forward of that many widths); may be 0
            only where no layer has experts.
        n_group, topk_group: expert groups, and how many of them a token may use.
        norm_topk_prob: whether the chosen scores are divided by their sum.
        routed_scaling_factor: factor on the routed experts' weights.
        kda_safe_gate, kda_lower_bound: the bounded forget gate and its bound (log space, < 0).
        rms_norm_eps: of the pre-norms, the final norm and the KDA output norm.
        initializer_range: standard deviation of a new model's matrices.
        extra: all other keys of the file, written back unchanged (JSON-able).

    Raises:
        ConfigError: a value out of its range, or values that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_group_size: int = 6
    head_dim: int = 128
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 6_000_000.0
    first_k_dense_replace: int = 2
    moe_intermediate_size: int = 768
    num_experts: int = 512
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    kda_safe_gate: bool = True
    kda_lower_bound: float = -5.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_type(f.name, str(f.type), getattr(self, f.name))
        if self.qk_rope_head_dim % 2:
            raise _bad("qk_rope_head_dim", f"{self.qk_rope_head_dim} is odd; rotary pairs need an even width")
        if self.kda_safe_gate and self.kda_lower_bound >= 0:
            raise _bad("kda_lower_bound", f"{self.kda_lower_bound} must be negative")
        if self.has_experts:
            self._check_experts()

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return self.first_k_dense_replace < self.num_hidden_layers

    def _check_experts(self) -> None:
        if self.num_experts % self.n_group:
            raise _bad("num_experts", f"{self.num_experts} experts do not divide into {self.n_group} groups")
        if self.num_experts // self.n_group < 2:
            raise _bad("n_group", "a group needs two experts: its score is the sum of its two best")
        if self.topk_group > self.n_group:
            raise _bad("topk_group", f"{self.topk_group} of {self.n_group} groups")
        reachable = self.topk_group * (self.num_experts // self.n_group)
        if self.num_experts_per_tok > reachable:
            raise _bad(
                "num_experts_per_tok",
                f"{self.num_experts_per_tok} of the {reachable} in {self.topk_group} groups",
            )
        if self.num_shared_experts < 1:
            raise _bad("num_shared_experts", "layers with experts have at least one shared expert")

    def is_mla(self, layer: int) -> bool:
        """Whether the layer is full attention (the last of its group); otherwise KDA."""
        return (layer + 1) % self.layer_group_size == 0

    def is_moe(self, layer: int) -> bool:
        """Whether the layer's feed-forward part has experts."""
        return layer >= self.first_k_dense_replace

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key head, both parts."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read the keys of a config.json (or of a train.toml's ``[model]`` table).

        Args:
            values: JSON-able keys; other spellings (``ALIASES``) are understood. Keys that do not touch the
                computation go to ``extra``.

        Raises:
            ConfigError: a required key is missing, a value is out of range, two spellings of a key disagree,
                or a key asks for a computation that this model does not have.
        """
        values = dict(values)
        for key, allowed in _FIXED.items():
            if key in values and values[key] not in allowed:
                raise _bad(key, f"{values[key]!r} is not supported; expected {allowed[0]!r}")
        names = {f.name for f in fields(cls)} - {"extra"}
        chosen: dict[str, Any] = {}
        for key in sorted(values, key=lambda k: (k in ALIASES, k)):
            name = ALIASES.get(key, key)
            if name not in names:
                continue
            if key == "linear_head_dim":  # transformers overwrites head_dim with the rope width on save
                chosen[name] = values[key]
            elif (known := chosen.setdefault(name, values[key])) is not values[key] and known != values[key]:
                raise _bad(key, f"{values[key]!r} contradicts {name} = {chosen[name]!r}")
        missing = [f for f in _REQUIRED if f not in chosen]
        if missing:
            raise ConfigError(f"The model config lacks {', '.join(missing)}.", where="[model] or config.json")
        rope = values.get("rope_parameters")
        if rope is not None:
            chosen["rope_theta"] = _rope_theta(rope, chosen.get("rope_theta"))
        for name in _FLOATS & chosen.keys():
            if type(chosen[name]) is int:
                chosen[name] = float(chosen[name])
        derived = names | ALIASES.keys() | _DERIVED
        extra = {k: v for k, v in values.items() if k not in derived and k != "extra"}
        config = cls(**chosen, extra=extra | dict(values.get("extra", {})))
        config._check_derived(values)
        return config

    def _check_derived(self, values: Mapping[str, Any]) -> None:
        layers = range(self.num_hidden_layers)
        shared = self.moe_intermediate_size * self.num_shared_experts
        expected = {
            "num_key_value_heads": self.num_attention_heads,
            "linear_num_heads": self.num_attention_heads,
            "qk_head_dim": self.qk_head_dim,
            "layer_types": ["full_attention" if self.is_mla(i) else "linear_attention" for i in layers],
            "mlp_layer_types": ["sparse" if self.is_moe(i) else "dense" for i in layers],
            "moe_shared_expert_intermediate_size": shared,
        }
        for key, value in expected.items():
            if values.get(key) is not None and values[key] != value:
                raise _bad(key, f"{values[key]!r} is not supported; the other keys imply {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """The keys of a config.json; ``from_dict`` gives an equal config back, transformers reads it too."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        fixed = {"model_type": MODEL_TYPE, "short_conv_kernel_size": CONV_WIDTH, "tie_word_embeddings": False}
        heads = {"num_key_value_heads": self.num_attention_heads}
        return {**self.extra, **fixed, **heads, **own}


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_FLOATS = {f.name for f in fields(ModelConfig) if f.type == "float"}
_NON_NEGATIVE = {"first_k_dense_replace", "num_shared_experts"}
_DERIVED = {
    "rope_parameters",
    "num_key_value_heads",
    "linear_num_heads",
    "qk_head_dim",
    "layer_types",
    "mlp_layer_types",
    "model_type",
    "short_conv_kernel_size",
    "linear_conv_kernel_dim",
    "tie_word_embeddings",
}


def _bad(key: str, problem: str) -> ConfigError:
    return ConfigError(f"The model config key {key} is not usable: {problem}.", where=key)


def _check_type(name: str, kind: str, value: Any) -> None:
    if kind == "bool":
        if not isinstance(value, bool):
            raise _bad(name, f"{value!r} is not true or false")
    elif kind == "float":
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _bad(name, f"{value!r} is not a number")
        if not math.isfinite(value):
            raise _bad(name, f"{value!r} is not finite")
        if name != "kda_lower_bound" and value <= 0:
            raise _bad(name, f"{value!r} must be positive")
    elif kind.startswith("int"):
        if value is None and "None" in kind:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise _bad(name, f"{value!r} is not a whole number")
        if value < (0 if name in _NON_NEGATIVE else 1):
            raise _bad(name, f"{value} is too small")
        if value > (limit := MAX_LAYERS if name == "num_hidden_layers" else MAX_WIDTH):
            raise _bad(name, f"{value} is more than {limit}")


def _rope_theta(rope: Any, plain: float | None) -> float:
    if not isinstance(rope, Mapping):
        raise _bad("rope_parameters", f"{rope!r} is not a table")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.keys() - {"rope_type", "type", "rope_theta"}:
        raise _bad("rope_parameters", f"{dict(rope)!r} scales the positions; only the default is supported")
    theta = rope.get("rope_theta", plain)
    if theta is None:
        raise _bad("rope_parameters", "it has no rope_theta")
    if plain is not None and float(theta) != float(plain):
        raise _bad("rope_parameters", f"its rope_theta {theta} contradicts rope_theta = {plain}")
    return float(theta)


_LING_TINY = ModelConfig(
    vocab_size=157_184,
    hidden_size=1536,
    intermediate_size=4608,
    num_hidden_layers=24,
    layer_group_size=4,
    num_attention_heads=16,
    head_dim=128,
    q_lora_rank=256,
    kv_lora_rank=512,
    rope_theta=10_000.0,
    first_k_dense_replace=1,
    moe_intermediate_size=512,
    num_experts=128,
)

_LING_FLASH = ModelConfig(
    vocab_size=157_184,
    hidden_size=2560,
    intermediate_size=6144,
    num_hidden_layers=42,
    layer_group_size=6,
    num_attention_heads=32,
    head_dim=128,
    q_lora_rank=None,
    kv_lora_rank=512,
    rope_theta=6_000_000.0,
    first_k_dense_replace=2,
    moe_intermediate_size=768,
    num_experts=512,
)

_CPU_MOE = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    layer_group_size=4,
    num_attention_heads=4,
    head_dim=16,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    rope_theta=10_000.0,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    # transformers' defaults lie outside a small vocabulary
    extra={"pad_token_id": None, "eos_token_id": None},
)

_CPU_BENCH = replace(
    _CPU_MOE,
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=384,
    head_dim=32,
    q_lora_rank=None,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    moe_intermediate_size=96,
)

PRESETS: dict[str, ModelConfig] = {
    "ling-3.0-tiny": _LING_TINY,
    "ling-3.0-flash": _LING_FLASH,
    "cpu-dense": replace(_CPU_MOE, first_k_dense_replace=4, q_lora_rank=None),
    "cpu-moe": _CPU_MOE,
    "cpu-bench": _CPU_BENCH,
}
"""Every preset by name; the ``preset`` key of train.toml's ``[model]`` table."""
