from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harts_core.plan.bundle_file import read_bundle
from harts_core.plan.validate import validate_plan
from harts_core.trees.tree_file import read_tree, write_tree
from tests.cli.program import run_harts, run_harts_process
from tests.support import random_sequences, tree_from_sequences


@pytest.fixture
def tree_path(tmp_path: Path, rng: np.random.Generator) -> Path:
    write_tree(tmp_path / "tree.arrow", tree_from_sequences(random_sequences(rng, num_rows=30)))
    return tmp_path / "tree.arrow"


def test_plans_and_reports(tree_path: Path, tmp_path: Path) -> None:
    result = run_harts("plan", tree_path, "-o", tmp_path / "plan", "--dp", 2, "--capacity", 300, "--pad", 8)
    assert result.returncode == 0, result.stderr
    assert "within-microbatch compression" in result.stdout
    assert result.stderr == ""
    bundle = read_bundle(tmp_path / "plan")
    validate_plan(bundle, read_tree(tree_path))
    assert bundle.parameters["pad"] == 8
    assert set(bundle.runtime) == {"read_s", "compile_s", "plan_s", "rounds_s", "validate_s", "planning_s"}


def test_json_is_the_manifest_with_times(tree_path: Path, tmp_path: Path) -> None:
    result = run_harts(
        "plan",
        tree_path,
        "-o",
        tmp_path / "p",
        "--dp",
        2,
        "--capacity",
        300,
        "--planner",
        "expanded",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    manifest = json.loads((tmp_path / "p" / "plan.json").read_text())
    assert {k: data[k] for k in manifest} == manifest
    assert data["planner"] == "expanded"
    assert data["metrics"]["within_compression"] == 1
    assert data["runtime"]["planning_s"] > 0
    assert not any(key.endswith("_s") for key in manifest["metrics"])


def test_repeat_replaces_with_the_same_bytes(tree_path: Path, tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        run_harts("plan", tree_path, "-o", tmp_path / "plan", "--dp", 3, "--capacity", 300)
        files = sorted((tmp_path / "plan").iterdir())
        contents.append({f.name: f.read_bytes() for f in files if f.name != "runtime.json"})
    assert contents[0] == contents[1]


def test_cost_model_option(tree_path: Path, tmp_path: Path) -> None:
    arguments = [
        "plan",
        tree_path,
        "-o",
        tmp_path / "p",
        "--dp",
        1,
        "--capacity",
        900,
        "--cost-model",
        "tokens",
    ]
    assert run_harts(*arguments).returncode == 0  # type: ignore[arg-type]
    bundle = read_bundle(tmp_path / "p")
    assert bundle.cost_model["name"] == "tokens"
    assert (bundle.units.cost_forward == bundle.units.padded_tokens).all()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--dp", "2", "--capacity", "10"], 4, "longer than the capacity"),
        (["--dp", "40", "--capacity", "500"], 4, "30 trajectories cannot give each of 40"),
        (["--dp", "2", "--capacity", "500", "--planner", "magic"], 2, "no such planner: magic"),
        (
            ["--dp", "2", "--capacity", "500", "--on-too-long", "split", "--planner", "expanded"],
            2,
            "needs a planner that shares by prefix trees",
        ),
        (["--dp", "0", "--capacity", "500"], 2, "dp must be a positive integer"),
        (["--dp", "1", "--capacity", "3000000000"], 2, "a positive integer up to 2147483647, not 3000000000"),
        (["--dp", "2", "--capacity", "500", "--cost-model", "none.toml"], 2, "no such cost model"),
        (["--dp", "2"], 2, "--capacity"),
    ],
)
def test_bad_use(tree_path: Path, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    result = run_harts("plan", tree_path, "-o", tmp_path / "plan", *arguments)
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tree.arrow"]


def test_drop_warns_and_records(tree_path: Path, tmp_path: Path) -> None:
    lengths = read_tree(tree_path).length
    capacity = int(np.sort(lengths)[-3])
    arguments = ("plan", tree_path, "-o", tmp_path / "p", "--dp", 1, "--capacity", capacity)
    result = run_harts(*map(str, arguments), "--on-too-long", "drop")
    assert result.returncode == 0, result.stderr
    dropped = read_bundle(tmp_path / "p").parameters["dropped_rows"]
    assert dropped == np.flatnonzero(lengths > capacity).tolist()
    assert f"{len(dropped)} trajectories longer than the capacity were dropped" in result.stderr


def test_damaged_tree_and_existing_output(tree_path: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.arrow").write_bytes(tree_path.read_bytes()[:100])
    result = run_harts("plan", tmp_path / "bad.arrow", "-o", tmp_path / "p", "--dp", 1, "--capacity", 900)
    assert (result.returncode, "not a readable Arrow IPC file" in result.stderr) == (3, True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    result = run_harts("plan", tree_path, "-o", tmp_path / "mine", "--dp", 1, "--capacity", 900)
    assert (result.returncode, "left alone" in result.stderr) == (3, True)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_in_a_fresh_process(tree_path: Path, tmp_path: Path) -> None:
    result = run_harts_process("plan", tree_path, "-o", tmp_path / "p", "--dp", "2", "--capacity", "10")
    assert result.returncode == 4
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
