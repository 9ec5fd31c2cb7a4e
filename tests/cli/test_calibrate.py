from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from unittest import mock

import jsonschema
import numpy as np
import pytest

from harts_core.exec.calibrate import over_stages
from harts_core.plan.cost_model import load_cost_model
from harts_core.trees.tree_file import write_tree
from schemas.generate import FOLDER
from tests.cli.program import run_harts
from tests.support import tree_from_sequences

CONFIG = '[model]\npreset = "cpu-moe"\n[runtime]\ndtype = "float32"\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "train.toml").write_text(CONFIG)
    return tmp_path / "train.toml"


def test_writes_a_cost_model_that_planning_reads(config: Path, tmp_path: Path) -> None:
    arguments = ["--config", config, "--capacity", "512", "--repeats", "1", "--chunk", "16"]
    result = run_harts("calibrate", *arguments, "-o", tmp_path / "cost.toml", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    jsonschema.validate(report, json.loads((FOLDER / "calibrate-report.schema.json").read_text()))
    model = load_cost_model(tmp_path / "cost.toml")
    assert model.name == "cost"
    assert (model.alpha_forward, model.beta_forward) == (
        report["forward"]["alpha"],
        report["forward"]["beta"],
    )
    assert model.beta_backward == report["backward"]["beta"]
    assert [t["tokens"] for t in report["timings"]] == [64] * 3 + [128] * 3 + [256] * 3 + [512] * 3
    assert all(t["forward_s"] > 0 and t["backward_s"] > 0 for t in report["timings"])
    write_tree(tmp_path / "tree.arrow", tree_from_sequences([[1, 2, 3], [1, 4]]))
    planned = run_harts(
        *("plan", tmp_path / "tree.arrow", "-o", tmp_path / "plan", "--dp", "1", "--capacity", "9"),
        *("--cost-model", tmp_path / "cost.toml"),
    )
    assert planned.returncode == 0, planned.stderr
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["cost_model"]["name"] == "cost"
    shown = run_harts("calibrate", *arguments, "-o", tmp_path / "cost.toml")
    assert "branches" in shown.stdout
    assert "R²" in shown.stdout


def test_times_that_do_not_grow_are_refused(config: Path, tmp_path: Path) -> None:
    faster_and_faster = (n**0.5 for n in itertools.count())
    with mock.patch.object(time, "perf_counter", side_effect=faster_and_faster):
        result = run_harts("calibrate", "--config", config, "--capacity", "64", "-o", tmp_path / "cost.toml")
    assert result.returncode == 5
    assert "the forward times of the units do not grow with their tokens" in result.stderr
    assert not (tmp_path / "cost.toml").exists()


def test_a_stage_takes_as_long_as_its_slowest_rank() -> None:
    ranks = np.array([[[1.0, 5.0]], [[2.0, 4.0]], [[30.0, 10.0]], [[20.0, 40.0]]])
    assert over_stages(ranks, 2).tolist() == [[32.0, 45.0]]
    assert over_stages(ranks, 1).tolist() == [[30.0, 40.0]]


@pytest.mark.parametrize(
    ("text", "arguments", "code", "message"),
    [
        ("[runtime]\n", [], 2, "no model is named"),
        (CONFIG, ["--capacity", "8"], 2, "capacity must be at least 64"),
        (CONFIG, ["--repeats", "0"], 2, "repeats must be a positive integer"),
        (CONFIG, ["-o", "missing/cost.toml"], 3, "folder does not exist"),
        (CONFIG, ["-o", "."], 3, "is a folder"),
        (CONFIG + "[parallel]\ndp = 2\n", [], 2, "[parallel] asks for 2 processes"),
        (CONFIG.replace("moe", "mole"), [], 2, "unknown preset"),
    ],
)
def test_bad_use(
    config: Path, tmp_path: Path, text: str, arguments: list[str], code: int, message: str
) -> None:
    config.write_text(text)
    result = run_harts("calibrate", "--config", config, "-o", tmp_path / "cost.toml", *arguments)
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.toml"]
