from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from harts_core.errors import ConfigError
from harts_core.exec.config import OPEN_KEYS, SECTIONS, ModelSection, TrainConfig, read_config
from harts_core.exec.model.config import ALIASES, PRESETS, ModelConfig
from harts_core.exec.model_section import NOT_COMPUTED, resolve_model_config
from harts_core.exec.objectives import OBJECTIVES
from harts_core.plan.schedule.pipeline import DEFAULT_LAG, SCHEDULES

DOC = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "train.toml"
    file.write_text(text)
    return file


def test_pipelines_have_one_default() -> None:
    assert TrainConfig().parallel.schedule_lag == DEFAULT_LAG
    assert TrainConfig().parallel.schedule == SCHEDULES[0]


def test_every_table_may_be_left_out(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, "")) == TrainConfig()


def test_keys_reach_their_fields_and_open_tables_collect_the_rest(tmp_path: Path) -> None:
    config = read_config(
        write(
            tmp_path,
            '[model]\npreset = "cpu-moe"\nnum_hidden_layers = 6\n'
            '[objective]\nname = "grpo"\nclip_high = 0.28\n'
            '[optimizer]\nlearning_rate = 1\nschedule = "cosine"\nwarmup_steps = 2\ndecay_steps = 10\n'
            "[parallel]\ntp = 1\n"
            '[runtime]\ndtype = "bfloat16"\nrecompute = "layer"\n',
        )
    )
    assert config.model.preset == "cpu-moe"
    assert config.model.overrides == {"num_hidden_layers": 6}
    assert config.objective.options == {"clip_high": 0.28}
    assert config.optimizer.learning_rate == 1.0
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.runtime.dtype == "bfloat16"
    resolved = config.to_dict()
    assert json.loads(json.dumps(resolved)) == resolved
    assert resolved["model"] == {"preset": "cpu-moe", "num_hidden_layers": 6}
    assert resolved["runtime"]["backend"] == "torch"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimiser]\n", "did you mean optimizer?"),
        ("[runtime]\ndtyp = 'float32'\n", "did you mean dtype?"),
        ("[runtime]\nzzz = 1\n", "known keys: dtype, device"),
        ("runtime = 3\n", "runtime must be a table"),
        ("[runtime]\ndtype = 'float16'\n", "dtype must be one of float32, bfloat16, float64, not 'float16'"),
        ("[runtime]\nthreads = 1.5\n", "threads must be an integer, not 1.5"),
        ("[runtime]\nthreads = true\n", "threads must be an integer, not True"),
        ("[runtime]\nseed = -1\n", "seed must be in"),
        ("[runtime]\nbackend = 'fla'\n", 'backend "fla" needs device'),
        ("[runtime]\nhead_block_rows = 0\n", "head_block_rows must be at least 1"),
        ("[runtime]\nmemory_budget_bytes = -1\n", "memory_budget_bytes must not be negative"),
        ("[runtime]\ncache_block_tokens = -1\n", "cache_block_tokens must not be negative"),
        ("[optimizer]\nlearning_rate = inf\n", "learning_rate must be finite"),
        ("[optimizer]\nlearning_rate = -1.0\n", "learning_rate must not be negative"),
        ("[optimizer]\nbeta2 = 1.0\n", "beta2 must be in [0, 1)"),
        ("[optimizer]\nschedule = 'cosine'\n", "needs decay_steps"),
        ("[optimizer]\nwarmup_steps = 5\ndecay_steps = 5\n", "decay_steps must be greater than warmup_steps"),
        ("[optimizer]\nlearning_rate = 1e-6\nmin_learning_rate = 1e-5\n", "must not exceed learning_rate"),
        ("[optimizer]\nnum_minibatches = 0\n", "num_minibatches must be at least 1"),
        ("[optimizer]\nexpert_bias_rate = -1.0\n", "expert_bias_rate must not be negative"),
        ("[objective]\nbalance_loss_coef = -1.0\n", "balance_loss_coef must not be negative"),
        ("[objective]\nbalance_loss = 'sequence'\n", 'balance_loss = "sequence" is not available'),
        ("[objective]\nbalance_loss = 'group'\n", "must be one of batch, sequence"),
        (
            "[parallel]\ndp = 2\nep = 2\nschedule = 'backward-first'\n",
            "not available where ep spans replicas",
        ),
        ("[parallel]\nsp = true\n", "sp = true needs tp > 1"),
        ("[parallel]\ndistributed_optimizer = true\n", "distributed_optimizer = true needs dp > 1"),
        (
            "[parallel]\ndp = 2\ndistributed_optimizer = true\n[runtime]\ndtype = 'float64'\n",
            "distributed_optimizer = true holds the optimizer's state in float32",
        ),
        ("[parallel]\ndp = 3\nep = 2\n", "ep = 2 does not divide dp · tp = 3"),
        ("[parallel]\ndp = 0\n", "dp must be at least 1"),
        ("[parallel]\nschedule_lag = 0\n", "schedule_lag must be at least 1"),
        ("[parallel]\nmax_live_producers = 0\n", "max_live_producers must be at least 1"),
        ("[model]\npreset = 3\n", "preset must be a string, not 3"),
        ("[model\n", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "absent.toml")


def toml_text(default: object) -> str:
    if default is MISSING:
        return "required"
    if default is None:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_every_key_is_documented_with_its_default() -> None:
    text = DOC.read_text(encoding="utf-8")
    for section, cls in SECTIONS.items():
        assert f"## `[{section}]`" in text
        part = text.split(f"## `[{section}]`")[1].split("\n## ")[0]
        keys = [f for f in fields(cls) if f.name != OPEN_KEYS.get(section)]
        if section == "model":
            keys += [f for f in fields(ModelConfig) if f.name != "extra"]
            assert all(f"`{name}`" in part for name in (*ALIASES, *NOT_COMPUTED, *PRESETS))
        for key in keys:
            line = next((x for x in part.splitlines() if x.startswith(f"| `{key.name}`")), None)
            assert line is not None, f"[{section}] {key.name} is not in docs/configuration.md"
            shown = line.split("|")[3].strip().strip("`*")
            if isinstance(key.default, float):
                assert float(shown) == key.default, key.name
            else:
                assert shown == toml_text(key.default), key.name


def test_every_option_of_every_objective_is_documented_with_its_default() -> None:
    part = DOC.read_text(encoding="utf-8").split("## `[objective]`")[1].split("\n## ")[0]
    for name, objective in OBJECTIVES.items():
        assert f"`{name}`" in part
        for key in fields(objective):
            line = next((x for x in part.splitlines() if x.startswith(f"| `{key.name}`")), None)
            assert line is not None, f"{key.name} of {name} is not in docs/configuration.md"
            first, *rest = re.findall(r"[`*]([^`*]+)[`*]", line.split("|")[3])
            shown = dict(zip(rest[::2], rest[1::2], strict=True)).get(name, first)
            assert shown == toml_text(key.default), f"{key.name} of {name}"
            owners = line.split("|")[4].strip()
            assert owners.startswith("all") != (f"`{name}`" in owners), f"{key.name} of {name}"


def test_config_and_objectives_import_no_torch() -> None:
    code = (
        "import sys, harts_core.exec.config, harts_core.exec.objectives;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_model_table() -> None:
    section = ModelSection(preset="cpu-moe", overrides={"num_hidden_layers": 8, "num_expert_group": 2})
    model = resolve_model_config(section)
    assert (model.num_hidden_layers, model.n_group, model.hidden_size) == (8, 2, 64)
    assert resolve_model_config(ModelSection(), model) is model
    assert resolve_model_config(section, model) is model
    shape = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    whole = resolve_model_config(ModelSection(overrides=shape | {"num_attention_heads": 2}))
    assert whole.head_dim == 128


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ModelSection(), "no model is named"),
        (ModelSection(preset="cpu-mo"), "did you mean cpu-moe?"),
        (ModelSection(preset="cpu-moe", overrides={"num_expert": 4}), "did you mean num_experts?"),
        (ModelSection(overrides={"vocab_size": 9}), "lacks hidden_size"),
        (ModelSection(preset="cpu-moe", overrides={"hidden_size": "64"}), "hidden_size"),
    ],
)
def test_mistakes_in_the_model_table_are_named(section: ModelSection, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model_config(section)
    assert message in str(caught.value)


def test_a_table_that_contradicts_the_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers = 8 contradicts the checkpoint, which has 4"):
        resolve_model_config(ModelSection(overrides={"num_hidden_layers": 8}), PRESETS["cpu-moe"])
