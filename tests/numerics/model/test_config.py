"""Model configs: what is read, written back, and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from harts_core.errors import ConfigError
from harts_core.exec.model.config import PRESETS, ModelConfig

MOE = PRESETS["cpu-moe"].to_dict()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_round_trip_through_json(name: str) -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(PRESETS[name].to_dict()))) == PRESETS[name]


def test_published_shapes() -> None:
    tiny, flash = PRESETS["ling-3.0-tiny"], PRESETS["ling-3.0-flash"]
    assert [i for i in range(tiny.num_hidden_layers) if tiny.is_mla(i)] == [3, 7, 11, 15, 19, 23]
    assert [i for i in range(flash.num_hidden_layers) if flash.is_mla(i)] == [5, 11, 17, 23, 29, 35, 41]
    assert [i for i in range(flash.num_hidden_layers) if not flash.is_moe(i)] == [0, 1]
    assert (tiny.qk_head_dim, flash.num_experts, flash.q_lora_rank) == (192, 512, None)


def test_other_keys_are_kept_and_written_back() -> None:
    config = ModelConfig.from_dict({**MOE, "architectures": ["X"], "num_nextn_predict_layers": 1})
    written = config.to_dict()
    assert written["architectures"] == ["X"]
    assert written["num_nextn_predict_layers"] == 1
    assert written["model_type"] == "bailing_hybrid"


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("num_experts", "num_local_experts"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_group", "num_expert_group"),
        ("num_shared_experts", "n_shared_experts"),
        ("norm_topk_prob", "moe_renormalize"),
    ],
)
def test_other_spellings(key: str, other: str) -> None:
    values = dict(MOE)
    values[other] = values.pop(key)
    assert ModelConfig.from_dict(values) == PRESETS["cpu-moe"]
    with pytest.raises(ConfigError, match="contradicts"):
        ModelConfig.from_dict({**MOE, other: not MOE[key] if isinstance(MOE[key], bool) else MOE[key] + 1})


def test_transformers_overwrites_head_dim_with_the_rope_width() -> None:
    values = {**MOE, "head_dim": 8, "linear_head_dim": 16}
    assert ModelConfig.from_dict(values).head_dim == 16


def test_rope_parameters() -> None:
    values = {k: v for k, v in MOE.items() if k != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    assert ModelConfig.from_dict({**values, "rope_parameters": rope}).rope_theta == 500.0
    with pytest.raises(ConfigError, match="scales the positions"):
        ModelConfig.from_dict({**values, "rope_parameters": {**rope, "rope_type": "yarn", "factor": 4}})
    with pytest.raises(ConfigError, match="contradicts"):
        ModelConfig.from_dict({**MOE, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("short_conv_kernel_size", 3),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("attention_dropout", 0.1),
        ("rope_scaling", {"type": "linear", "factor": 2}),
        ("sliding_window", 128),
        ("score_function", "softmax"),
        ("moe_expert_capacity_factor", 1.25),
        ("moe_token_drop_policy", "probs"),
        ("moe_pad_expert_input_to_capacity", True),
        ("capacity_factor", 1.0),
        ("expert_capacity", 64),
        ("drop_tokens", True),
        ("num_key_value_heads", 2),
        ("layer_types", ["full_attention"] * 4),
        ("mlp_layer_types", ["dense"] * 4),
        ("hidden_size", 0),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("q_lora_rank", 0),
        ("qk_rope_head_dim", 7),
        ("num_experts", 7),
        ("n_group", 8),
        ("topk_group", 5),
        ("num_experts_per_tok", 5),
        ("num_shared_experts", 0),
        ("kda_lower_bound", 1.0),
        ("kda_safe_gate", 1),
        ("rms_norm_eps", -1e-6),
        ("routed_scaling_factor", "2.5"),
        ("rope_parameters", 3),
    ],
)
def test_refused_values_name_the_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict({**MOE, key: value})
    assert key in str(caught.value)


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        ModelConfig.from_dict({k: v for k, v in MOE.items() if k != "hidden_size"})


def test_expert_keys_do_not_matter_without_expert_layers() -> None:
    dense = replace(PRESETS["cpu-dense"], num_experts=7, num_shared_experts=0)
    assert not any(dense.is_moe(i) for i in range(dense.num_hidden_layers))
