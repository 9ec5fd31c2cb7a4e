"""Checkpoints and log-probabilities against transformers' own bailing_hybrid model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from harts_core.errors import CorruptFileError, DataError
from harts_core.exec.config import OptimizerSection
from harts_core.exec.layout import build_unit_layout
from harts_core.exec.model.decoder import HybridModel
from harts_core.exec.objectives import Grpo
from harts_core.exec.optimizer import Optimizer
from harts_core.exec.trainer import Trainer
from harts_core.exec.weights.hf_checkpoint import read_hf_checkpoint, write_hf_checkpoint
from harts_core.exec.weights.load import load_weights
from harts_core.trees.rollout_tree import RolloutTree
from tests.support_train import plan_of, random_tree

pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_local_experts": 8,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "moe": {},
    "dense": {"first_k_dense_replace": 4},
    "q_lora": {"q_lora_rank": 24},
    "open_gate": {"kda_safe_gate": False},
    "two_shared_experts": {"n_shared_experts": 2, "norm_topk_prob": False},
}


class Float64Islands(TorchFunctionMode):
    """transformers casts to float32 by name in its gates, norms, states and router; here that is float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def hf() -> Iterator[Any]:
    """transformers' modelling module, with its plain torch linear attention."""
    present = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        from transformers.models.bailing_hybrid import modeling_bailing_hybrid as module
    finally:
        if present is None:
            del sys.modules["fla"]
        else:
            sys.modules["fla"] = present
    return module


def hf_model(hf: Any, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig

    torch.manual_seed(0)
    model = hf.BailingHybridForCausalLM(BailingHybridConfig(**{**SMALL, **changes}))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(mean=1.0, std=0.1)
    model.set_experts_implementation("eager")  # the grouped one has no float64
    return model.to(dtype).eval()


def hf_logprobs(model: Any, tree: RolloutTree, dtype: torch.dtype) -> torch.Tensor:
    """λ of every trained position by one forward per trajectory, ordered by (row, position)."""
    rotary = model.model.rotary_emb
    if dtype is torch.float64:
        with Float64Islands():
            rotary.inv_freq = rotary.compute_default_rope_parameters(model.config)[0]
        assert rotary.inv_freq.dtype == torch.float64
    values = []
    for row in range(tree.num_rows):
        tokens = torch.tensor(tree.tokens(row).astype(np.int64))
        trained = torch.tensor(tree.trained_positions(row).astype(np.int64))
        if dtype is torch.float64:
            with Float64Islands():
                logits = model(tokens[None], use_cache=False).logits[0]
        else:
            logits = model(tokens[None], use_cache=False).logits[0]
        λ = torch.log_softmax(logits.to(dtype), -1)
        values.append(λ[trained - 1, tokens[trained]])
    return torch.cat(values).detach()


def our_logprobs(model: HybridModel, tree: RolloutTree, sharing: str) -> torch.Tensor:
    trainer = Trainer(model, Grpo(), Optimizer(model.named_parameters(), OptimizerSection()))
    return trainer.logprobs(build_unit_layout(plan_of(tree, sharing=sharing), tree, 0)).detach()


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probs_of_a_transformers_checkpoint(hf: Any, tmp_path: Path, variant: str) -> None:
    reference = hf_model(hf, **VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    checkpoint = read_hf_checkpoint(tmp_path)
    tree = random_tree(3)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model = HybridModel(checkpoint.config, dtype=dtype, seed=1)
        assert load_weights(model, checkpoint) == {}
        expected = hf_logprobs(reference.to(dtype), tree, dtype)
        for sharing in ("none", "tree"):
            λ = our_logprobs(model, tree, sharing)
            assert λ.dtype == dtype
            torch.testing.assert_close(λ, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000])
@pytest.mark.parametrize("variant", ["moe", "dense", "q_lora"])
def test_transformers_reads_what_is_written(
    hf: Any, tmp_path: Path, variant: str, max_shard_bytes: int
) -> None:
    reference = hf_model(hf, **VARIANTS[variant])
    reference.save_pretrained(tmp_path / "theirs")
    checkpoint = read_hf_checkpoint(tmp_path / "theirs")
    model = HybridModel(checkpoint.config, dtype=torch.float32, seed=1)
    load_weights(model, checkpoint)
    ours = tmp_path / "ours"
    ours.mkdir()
    write_hf_checkpoint(
        ours, model.state_dict(), model.config, dtype="float32", max_shard_bytes=max_shard_bytes
    )
    assert (ours / "model.safetensors").exists() == (max_shard_bytes == 10**9)
    again, info = hf.BailingHybridForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(40)[None] * 7 % 200
    assert torch.equal(again.eval()(tokens).logits, reference(tokens).logits)
    for name, value in reference.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_shards_load_like_one_file(hf: Any, tmp_path: Path) -> None:
    reference = hf_model(hf)
    reference.save_pretrained(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    states = []
    for folder in ("one", "many"):
        checkpoint = read_hf_checkpoint(tmp_path / folder)
        model = HybridModel(checkpoint.config, dtype=torch.float32, seed=1)
        load_weights(model, checkpoint)
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_bfloat16_checkpoints_keep_their_float32_islands(hf: Any, tmp_path: Path) -> None:
    hf_model(hf, torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = read_hf_checkpoint(tmp_path)
    model = HybridModel(checkpoint.config, dtype=torch.bfloat16, seed=1)
    load_weights(model, checkpoint)
    by_dtype = {name: p.dtype for name, p in model.state_dict().items()}
    assert by_dtype["model.layers.0.attention.q_proj.weight"] == torch.bfloat16
    assert by_dtype["model.layers.0.attention.A_log"] == torch.float32
    assert by_dtype["model.layers.1.mlp.gate.expert_bias"] == torch.float32


def test_extra_layers_and_unknown_keys_are_written_back(hf: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    reference = hf_model(hf)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    mtp = {f"model.layers.4.{n}": torch.randn(3, 2).bfloat16() for n in ("eh_proj.weight", "enorm.weight")}
    save_file(tensors | mtp, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"made_up_key": [1, {"a": None}]}))

    checkpoint = read_hf_checkpoint(tmp_path)
    model = HybridModel(checkpoint.config, dtype=torch.float32, seed=1)
    extra = load_weights(model, checkpoint)
    assert extra.keys() == mtp.keys()
    (tmp_path / "again").mkdir()
    write_hf_checkpoint(
        tmp_path / "again", model.state_dict(), model.config, dtype="float32", extra_tensors=extra
    )
    written = load_file(tmp_path / "again" / "model.safetensors")
    for name, value in (tensors | mtp).items():
        assert written[name].dtype == value.dtype
        assert torch.equal(written[name], value), name
    assert json.loads((tmp_path / "again" / "config.json").read_text())["made_up_key"] == [1, {"a": None}]
    assert read_hf_checkpoint(tmp_path / "again").config.extra["made_up_key"] == [1, {"a": None}]


def test_weights_that_do_not_fit_are_refused(hf: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hf_model(hf).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    model = HybridModel(read_hf_checkpoint(tmp_path).config, dtype=torch.float32, seed=1)
    before = {n: t.clone() for n, t in model.state_dict().items()}

    def refuse(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, file)
        with pytest.raises(DataError, match=message):
            load_weights(model, read_hf_checkpoint(tmp_path))
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())

    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    refuse({n: t for n, t in good.items() if n != name}, f"lacks tensors: {name}")
    refuse(good | {"model.other": torch.zeros(1)}, r"tensors that the model lacks: model\.other")
    refuse(good | {name: torch.zeros(32, 63)}, r"has shape \[32, 63\], the model needs \[32, 64\]")
    refuse(good | {name: torch.zeros(32, 64, dtype=torch.int8)}, "has dtype I8")


def test_broken_folders_are_refused(hf: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        read_hf_checkpoint(tmp_path)
    hf_model(hf).save_pretrained(tmp_path, max_shard_size="100KB")
    index_file = tmp_path / "model.safetensors.index.json"
    assert len(read_hf_checkpoint(tmp_path).tensors) > 100
    index = json.loads(index_file.read_text())
    name, shard = next(iter(index["weight_map"].items()))

    def refuse(changes: dict[str, str], error: type[Exception], message: str) -> None:
        index_file.write_text(json.dumps({"weight_map": index["weight_map"] | changes}))
        with pytest.raises(error, match=message):
            read_hf_checkpoint(tmp_path)

    refuse({name: "../model.safetensors"}, DataError, "names a file outside the folder")
    refuse({"another": shard}, DataError, "disagree about another")
    refuse({name: "absent.safetensors"}, DataError, "no such file|disagree about")
    data = (tmp_path / shard).read_bytes()
    (tmp_path / shard).write_bytes(data[:-1])
    refuse({}, CorruptFileError, "bytes of tensors are announced")
    (tmp_path / "config.json").write_text("{")
    refuse({}, CorruptFileError, "not JSON")
