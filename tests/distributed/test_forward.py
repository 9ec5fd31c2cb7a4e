"""``harts logprob`` and ``harts calibrate`` in several processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from harts_core.plan.bundle_file import write_bundle
from harts_core.plan.cost_model import load_cost_model
from harts_core.plan.options import PlanOptions
from harts_core.plan.plan_tree import plan_tree
from harts_core.trees.tree_file import read_tree, write_tree
from tests.cli.program import run_harts
from tests.distributed.launch import run
from tests.support_train import TOML, random_tree

LAYOUTS = {
    "replicas": "[parallel]\ndp = 2\nep = 2\ntimeout_s = 60\n",
    "pipeline": "[parallel]\npp = 2\ntimeout_s = 60\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tree, a plan of psRL's for two replicas, and a configuration for each layout and for one process."""
    tree = write_tree(tmp_path / "tree.arrow", random_tree(21, num_rows=12))
    capacity = int(tree.length.max()) // 2
    options = PlanOptions(dp=2, capacity=capacity, planner="psrl", chunk=16, on_too_long="split")
    write_bundle(tmp_path / "plan", plan_tree(tree, options))
    text = TOML.format(dtype="float32", every=0, keep=1) + "\n"
    (tmp_path / "one.toml").write_text(text)
    for name, parallel in LAYOUTS.items():
        (tmp_path / f"{name}.toml").write_text(text + parallel)
    return tmp_path


def logprob(folder: Path, config: str) -> list[str]:
    files = ["--tree", str(folder / "tree.arrow"), "--config", str(folder / f"{config}.toml")]
    return [
        *("logprob", str(folder / "plan"), *files, "-o", str(folder / f"{config}.arrow")),
        *("--as", "old", "--json"),
    ]


def logs(folder: Path) -> list[str]:
    return [(folder / f"rank-{rank}.log").read_text() for rank in range(2)]


def test_logprob_writes_what_one_process_does(folder: Path) -> None:
    alone = run_harts(*logprob(folder, "one"))
    assert alone.returncode == 0, alone.stderr
    expected = read_tree(folder / "one.arrow").old_logprobs
    assert expected is not None
    for layout in LAYOUTS:
        codes = run(["-m", "harts_cli.main", *logprob(folder, layout)], 2, folder=folder)
        first, second = logs(folder)
        assert codes == [0, 0], first + second
        report, reference = json.loads(first), json.loads(alone.stdout)
        assert second == ""
        for key in ("rows", "positions", "original_tokens", "computed_tokens"):
            assert report[key] == reference[key]
        found = read_tree(folder / f"{layout}.arrow").old_logprobs
        assert found is not None
        np.testing.assert_array_equal(found.offsets, expected.offsets)
        np.testing.assert_allclose(found.values, expected.values, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_weights_come_from_a_checkpoint_in_parts(folder: Path) -> None:
    """Of replicas that trained a step, read by pipeline stages and by one process."""
    files = ["--tree", str(folder / "tree.arrow"), "--config", str(folder / "replicas.toml")]
    arguments = ["train", str(folder / "plan"), *files, "--out", str(folder / "run")]
    codes = run(["-m", "harts_cli.main", *arguments], 2, folder=folder)
    assert codes == [0, 0], logs(folder)
    checkpoint = ["--checkpoint", str(folder / "run" / "checkpoints" / "step-000001")]
    initial = run_harts(*logprob(folder, "one"))
    before = read_tree(folder / "one.arrow").old_logprobs
    alone = run_harts(*logprob(folder, "one"), *checkpoint)
    after = read_tree(folder / "one.arrow").old_logprobs
    assert (initial.returncode, alone.returncode) == (0, 0), alone.stderr
    codes = run(["-m", "harts_cli.main", *logprob(folder, "pipeline"), *checkpoint], 2, folder=folder)
    assert codes == [0, 0], logs(folder)
    found = read_tree(folder / "pipeline.arrow").old_logprobs
    assert before is not None
    assert after is not None
    assert found is not None
    np.testing.assert_allclose(found.values, after.values, rtol=1e-5, atol=0)
    assert np.abs(after.values - before.values).max() > 1e-3


def test_calibrate_times_the_layout(folder: Path) -> None:
    for layout, text in LAYOUTS.items():
        cost = folder / f"{layout}-cost.toml"
        arguments = [*("calibrate", "--config", str(folder / f"{layout}.toml"), "-o", str(cost))]
        arguments += ["--capacity", "512", "--repeats", "1", "--chunk", "16", "--json"]
        codes = run(["-m", "harts_cli.main", *arguments], 2, folder=folder)
        first, second = logs(folder)
        assert codes == [0, 0], first + second
        report = json.loads(first)
        assert second == ""
        degrees = {key: report[key] for key in ("dp", "tp", "pp", "ep")}
        stated = {key: int(value) for key, value in re.findall(r"(dp|tp|pp|ep) = (\d)", text)}
        assert degrees == {"dp": 1, "tp": 1, "pp": 1, "ep": 1} | stated
        assert load_cost_model(cost).alpha_forward == report["forward"]["alpha"]
        assert all(unit["forward_s"] > 0 and unit["backward_s"] > 0 for unit in report["timings"])


@pytest.mark.slow
def test_a_lost_process_ends_the_forward_pass(folder: Path) -> None:
    text = (folder / "replicas.toml").read_text().replace("timeout_s = 60", "timeout_s = 15")
    (folder / "replicas.toml").write_text(text)
    codes = run(["-m", "tests.distributed.lost_forward", *logprob(folder, "replicas")], 2, folder=folder)
    first, second = logs(folder)
    assert codes == [5, 9], first + second
    assert "another process died or did not answer within 15 s" in first
    assert re.search(r"rank 1 was last in forward of unit \d+", first), first
    assert "Traceback" not in first
    assert not (folder / "replicas.arrow").exists()
