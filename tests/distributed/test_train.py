"""``harts train`` in several processes: same metrics as one, and runs that go on with other degrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harts_core.plan.build import build_bundle
from harts_core.plan.bundle_file import write_bundle
from harts_core.trees.tree_file import write_tree
from tests.cli.program import run_harts
from tests.distributed.launch import run
from tests.support_train import COST, TOML, random_tree

SPLIT = "[parallel]\ntp = 2\nsp = true\nep = 2\ntimeout_s = 60\n"
PIPELINE = "[parallel]\npp = 2\ntimeout_s = 60\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tree, a plan for two replicas, and a configuration without ``[parallel]``."""
    tree = random_tree(0)
    consumer = [i * 4 // tree.num_rows for i in range(tree.num_rows)]
    bundle = build_bundle(
        write_tree(tmp_path / "tree.arrow", tree),
        planner="harts-l1",
        parameters={"dp": 2, "capacity": 1_000_000, "pad": 2, "chunk": 16, "seed": 0},
        cost_model=COST,
        replica=[c % 2 for c in consumer],
        slot=[c // 2 for c in consumer],
        sharing="tree",
    )
    write_bundle(tmp_path / "plan", bundle)
    text = TOML.format(dtype="float64", every=1, keep=9) + "\n"
    (tmp_path / "one.toml").write_text(text)
    (tmp_path / "split.toml").write_text(text + SPLIT)
    (tmp_path / "pipeline.toml").write_text(text + PIPELINE)
    return tmp_path


def arguments(folder: Path, config: str, out: str, steps: int, *more: str) -> list[str]:
    files = ["--tree", str(folder / "tree.arrow"), "--config", str(folder / config)]
    return ["train", str(folder / "plan"), *files, "--out", str(folder / out), "--steps", str(steps), *more]


def train_in_two(folder: Path, config: str, out: str, steps: int, *more: str) -> None:
    command = ["-m", "harts_cli.main", *arguments(folder, config, out, steps, *more)]
    codes = run(command, 2, folder=folder)
    assert codes == [0, 0], "\n".join((folder / f"rank-{rank}.log").read_text() for rank in range(2))


def train_alone(folder: Path, out: str, steps: int, *more: str) -> None:
    result = run_harts(*arguments(folder, "one.toml", out, steps, *more))
    assert not result.returncode, result.stderr


def metrics(folder: Path, out: str) -> list[dict[str, Any]]:
    lines = (folder / out / "metrics.jsonl").read_text().splitlines()
    clock = ("seconds", "tokens_per_s", "interface_bytes")
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def test_runs_go_on_with_other_degrees(folder: Path) -> None:
    """Two steps split over tensor and expert ranks, one over pipeline stages, one in a single process."""
    train_alone(folder, "alone", 4)
    expected = metrics(folder, "alone")
    assert [step["step"] for step in expected] == [1, 2, 3, 4]

    train_in_two(folder, "split.toml", "run", 2)
    assert (folder / "rank-0.log").read_text().count("step ") >= 2
    assert "loss" not in (folder / "rank-1.log").read_text()
    train_in_two(folder, "pipeline.toml", "run", 3, "--resume")
    train_alone(folder, "run", 4, "--resume")
    for found, want in zip(metrics(folder, "run"), expected, strict=True):
        assert found == pytest.approx(want, rel=1e-9)
