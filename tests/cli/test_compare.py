from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.rollout_tree import RolloutTree
from harts_core.trees.tree_file import read_tree, write_tree
from tests.cli.program import run_harts
from tests.support import random_sequences, tree_from_sequences

PLANNERS = "harts-l1,psrl,group-prefix,expanded"


@pytest.fixture
def tree(tmp_path: Path, rng: np.random.Generator) -> RolloutTree:
    sequences = random_sequences(rng, num_rows=30)
    write_tree(
        tmp_path / "tree.arrow", tree_from_sequences(sequences, groups=[f"g{i % 5}" for i in range(30)])
    )
    return read_tree(tmp_path / "tree.arrow")


def test_json_has_every_plan(tree: RolloutTree, tmp_path: Path) -> None:
    arguments = ["--planners", PLANNERS, "--dp", "1,3", "--seeds", "0,5", "--capacity", "300", "--json"]
    result = run_harts("compare", tmp_path / "tree.arrow", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert (data["rows"], data["capacity"], data["tree_sha256"]) == (30, 300, tree.content_sha256)
    settings = [(r["dp"], r["planner"], r["seed"]) for r in data["results"]]
    assert settings == [(d, p, s) for d in (1, 3) for p in PLANNERS.split(",") for s in (0, 5)]
    for r in data["results"]:
        options = PlanOptions(dp=r["dp"], capacity=300, planner=r["planner"], seed=r["seed"])
        m = plan_tree(tree, options).metrics
        assert r["metrics"] == m
        assert r["failure"] is None
        assert r["planning_s"] > 0
        gap = 1 - m["effective_compression"] / m["bound_decoder"]
        assert r["gaps"]["effective_compression"] == pytest.approx(gap)


def test_the_table_has_medians_and_bounds(tree: RolloutTree, tmp_path: Path) -> None:
    result = run_harts(
        "compare", tmp_path / "tree.arrow", "--dp", "2", "--capacity", "300", "--seeds", "0,1,2"
    )
    assert (result.returncode, result.stderr) == (0, "")
    names = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("2 ")]
    assert names[:3] == ["bound", "harts", "harts-l1"]
    assert len(names) >= 10
    bundles = [plan_tree(tree, PlanOptions(dp=2, capacity=300, planner="harts-l1", seed=s)) for s in range(3)]
    middle = np.median([b.metrics["within_compression"] for b in bundles])
    line = next(line for line in result.stdout.splitlines() if line.startswith("2  harts-l1"))
    assert f"{middle:.3f}" in line.split()
    assert "medians over 3 seeds" in result.stdout


def test_block_sizes_are_rows(tree: RolloutTree, tmp_path: Path) -> None:
    config = tmp_path / "train.toml"
    config.write_text('[model]\npreset = "cpu-moe"\n')
    command: list[str | Path] = ["compare", tmp_path / "tree.arrow", "--dp", "2", "--capacity", "100"]
    command += ["--planners", "psrl,expanded", "--block-tokens", "1,16", "--config", config, "--chunk", "4"]
    result = run_harts(*command, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert data["cache_unit"] == "bytes"
    blocks = {r["planner"]: r["cache"]["blocks"] for r in data["results"]}
    assert [b["block_tokens"] for b in blocks["psrl"]] == [None, 1, 16]
    assert {b["peak"] for b in blocks["expanded"]} == {0}
    adaptive, single, sixteen = blocks["psrl"]
    assert 0 < adaptive["peak"] == single["peak"] < sixteen["peak"]
    shown = run_harts(*command).stdout
    assert "cache between microbatches in bytes" in shown
    lines = [line.split() for line in shown.splitlines()]
    copied = f"{sixteen['copied_tokens']:,}"
    assert next(line[-3:] for line in lines if line[1:3] == ["psrl", "16"]) == [
        copied,
        f"{sixteen['computed_tokens']:,}",
        f"{sixteen['decoder_compression']:.3f}",
    ]


def test_a_planner_without_a_plan_is_a_row(tree: RolloutTree, tmp_path: Path) -> None:
    longest = int(tree.length.max())
    command = (
        "compare",
        tmp_path / "tree.arrow",
        "--planners",
        "harts-l1,expanded",
        "--capacity",
        str(longest),
    )
    result = run_harts(*command, "--dp", "1,31")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[2:4] for row in rows if row[:2] == ["31", "harts-l1"]][0:1] == [["no", "plan"]]
    assert "30 trajectories cannot give each of 31 replicas one" in result.stdout
    result = run_harts(*command, "--dp", "31", "--json")
    assert result.returncode == 4
    assert result.stderr == "fail: no planner found a plan\n"
    assert all(r["metrics"] is None for r in json.loads(result.stdout)["results"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--dp", "2", "--capacity", "300", "--planners", "magic"], 2, "no such planner: magic"),
        (["--dp", "2,x", "--capacity", "300"], 2, "--dp must be integers separated by commas"),
        (["--dp", "2", "--capacity", "300", "--seeds", ""], 2, "--seeds must be integers"),
        (["--dp", "0", "--capacity", "300"], 2, "dp must be a positive integer"),
        (["--dp", "2", "--capacity", "300", "--block-tokens", "16,0"], 2, "a block holds at least one token"),
        (["--dp", "2", "--capacity", "300", "--block-tokens", "x"], 2, "--block-tokens must be integers"),
        (["--dp", "2", "--capacity", "300", "--config", "none.toml"], 2, "none.toml"),
        (
            ["--dp", "2", "--capacity", "300", "--on-too-long", "split", "--planners", "expanded"],
            2,
            "needs a planner that shares by prefix trees",
        ),
        (["--dp", "2", "--capacity", "3", "--planners", "psrl"], 4, "no planner found a plan"),
    ],
)
def test_bad_use(tree: RolloutTree, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    result = run_harts("compare", tmp_path / "tree.arrow", *arguments)
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
