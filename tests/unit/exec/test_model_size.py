"""The estimate of a model's size, and what is refused before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harts_core.errors import ConfigError, ExecError
from harts_core.exec.config import RuntimeSection, TrainConfig
from harts_core.exec.model.config import PRESETS, ModelConfig
from harts_core.exec.model_section import resolve_model_config
from harts_core.exec.model_size import check_model_fits, num_weights


@pytest.mark.parametrize("preset", ["cpu-dense", "cpu-moe"])
@pytest.mark.parametrize("rank", [None, 8])
def test_weights_are_the_matrices_of_the_model(preset: str, rank: int | None) -> None:
    torch = pytest.importorskip("torch")
    from harts_core.exec.model.decoder import HybridModel

    config = replace(PRESETS[preset], q_lora_rank=rank)
    with torch.device("meta"):
        model = HybridModel(config, dtype=torch.float32, kda_backend="torch", seed=None)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "conv" not in name)
    assert num_weights(config) == matrices


@pytest.mark.parametrize("training", [False, True])
def test_a_model_beyond_the_memory_is_refused_with_its_size(training: bool) -> None:
    huge = replace(PRESETS["cpu-dense"], hidden_size=2**31 - 1, num_hidden_layers=10_000)
    with pytest.raises(ExecError, match=r"weights.* need [\d,.]+ GiB, the cpu has [\d,.]+ GiB"):
        check_model_fits(huge, RuntimeSection(), training=training)


def test_small_models_fit() -> None:
    check_model_fits(PRESETS["cpu-moe"], RuntimeSection(dtype="float64"), training=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_theta": float("nan")}, "rope_theta is not usable: nan is not finite"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is not usable: inf is not finite"),
        ({"num_hidden_layers": 10**9}, "1000000000 is more than 10000"),
        ({"vocab_size": 10**10}, "10000000000 is more than 2147483647"),
    ],
)
def test_model_errors_name_the_file(keys: dict[str, float], message: str) -> None:
    section = TrainConfig.from_dict({"model": {"preset": "cpu-dense", **keys}}).model
    with pytest.raises(ConfigError, match=message) as error:
        resolve_model_config(section, where="train.toml")
    assert error.value.where == "train.toml, [model]"


def test_a_key_that_is_nan_twice_is_not_a_contradiction() -> None:
    values = PRESETS["cpu-dense"].to_dict() | {"rope_theta": float("nan")}
    with pytest.raises(ConfigError, match="is not finite"):
        ModelConfig.from_dict(values)


def test_threads_are_bounded() -> None:
    with pytest.raises(ConfigError, match="threads must be at most 1024"):
        TrainConfig.from_dict({"runtime": {"threads": 10**9}})
