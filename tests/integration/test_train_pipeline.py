"""The commands one after another: synth, ingest, plan, train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.program import run_harts

CONFIG = """
[model]
preset = "{preset}"
[objective]
clip_high = 0.28
normalise = "{normalise}"
[optimizer]
learning_rate = 1e-3
weight_decay = 0.01
[runtime]
threads = {threads}
"""


@pytest.fixture(autouse=True)
def _keep_threads() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def harts(*arguments: object) -> str:
    result = run_harts(*map(str, arguments))
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(("kind", "normalise"), [("tree-step", "token"), ("step", "group")])
def test_synth_to_train(tmp_path: Path, kind: str, normalise: str) -> None:
    rows, tree, config = tmp_path / "rows.parquet", tmp_path / "tree.arrow", tmp_path / "train.toml"
    harts("synth", "-o", rows, "--kind", kind, "--rows", 16)
    harts("ingest", rows, "-o", tree)
    config.write_text(CONFIG.format(preset="cpu-moe", normalise=normalise, threads=1))
    steps: dict[str, list[dict[str, Any]]] = {}
    for planner in ("harts-l1", "expanded"):
        plan, out = tmp_path / f"plan-{planner}", tmp_path / f"run-{planner}"
        harts("plan", tree, "-o", plan, "--planner", planner, "--dp", 2, "--capacity", 1024)
        report = harts(
            "train", plan, "--tree", tree, "--config", config, "--out", out, "--steps", 3, "--json"
        )
        steps[planner] = json.loads(report)["steps"]
    for shared, expanded in zip(steps["harts-l1"], steps["expanded"], strict=True):
        assert shared["loss"] == pytest.approx(expanded["loss"], rel=1e-5)
        assert shared["grad_norm"] == pytest.approx(expanded["grad_norm"], rel=1e-4)
        assert shared["trained_positions"] == expanded["trained_positions"]
        assert 2 * shared["compact_tokens"] < expanded["compact_tokens"]
    losses = [s["loss"] for s in steps["harts-l1"]]
    assert losses[2] < losses[0]
