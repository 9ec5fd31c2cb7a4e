"""Whole runs with router losses, bias updates and an entropy bonus, through train.toml."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harts_core.exec.run import RunOptions, train_run
from tests.support_train import TOML, write_inputs

OBJECTIVE = """[objective]
name = "ppo"
dual_clip = 3.0
entropy_coef = 0.01
router_z_loss_coef = 0.001
balance_loss_coef = 0.01
"""
BIAS = "[optimizer]\nexpert_bias_rate = 0.001\n"


def write(folder: Path, dtype: str) -> Path:
    text = TOML.format(dtype=dtype, every=1, keep=3)
    file = folder / "train.toml"
    file.write_text(text.replace("[objective]\n", OBJECTIVE).replace("[optimizer]\n", BIAS))
    return file


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_shared_and_expanded_plans_train_the_same_router(tmp_path: Path) -> None:
    tree, shared, expanded = write_inputs(tmp_path, seed=3)
    config = write(tmp_path, "float64")
    runs = {}
    for plan in (shared, expanded):
        out = tmp_path / f"run-{plan.name}"
        train_run(RunOptions(plans=(plan,), trees=(tree,), config=config, out=out, steps=3))
        runs[plan.name] = lines(out)
    clock = {"seconds", "tokens_per_s", "compact_tokens", "units", "rounds"}
    for a, b in zip(runs["shared"], runs["expanded"], strict=True):
        same = a.keys() - clock
        assert {k: a[k] for k in same} == pytest.approx({k: b[k] for k in same}, rel=1e-9)
    first, last = runs["shared"][0], runs["shared"][-1]
    assert {"router_z_loss", "balance_loss", "expert_load_max", "experts_idle", "entropy"} <= first.keys()
    assert last["loss"] < first["loss"]
    resolved = json.loads((tmp_path / "run-shared" / "config.json").read_text())
    assert resolved["objective"]["balance_loss_coef"] == 0.01
    assert resolved["objective"]["dual_clip"] == 3.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bias_resumes_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    tree, shared, _ = write_inputs(tmp_path, seed=3)
    config, out = write(tmp_path, dtype), tmp_path / "run"
    options = {"plans": (shared,), "trees": (tree,), "config": config, "out": out, "steps": 3}
    train_run(RunOptions(**options))  # type: ignore[arg-type]
    last = out / "checkpoints" / "step-000003"
    files = ("model.safetensors", "optimizer.safetensors")
    want, metrics = [(last / name).read_bytes() for name in files], lines(out)
    for step in ("step-000002", "step-000003"):
        shutil.rmtree(out / "checkpoints" / step)
    train_run(RunOptions(**options, resume=True))  # type: ignore[arg-type]
    assert [(last / name).read_bytes() for name in files] == want
    for a, b in zip(lines(out), metrics, strict=True):
        assert {k: v for k, v in a.items() if k not in ("seconds", "tokens_per_s")} == {
            k: v for k, v in b.items() if k not in ("seconds", "tokens_per_s")
        }
