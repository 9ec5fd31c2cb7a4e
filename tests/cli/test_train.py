from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harts_core.exec.checkpoint import list_checkpoints, read_state
from harts_core.trees.tree_file import write_tree
from tests.cli.program import Result, run_harts
from tests.support_train import random_tree, write_config, write_inputs

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def harts(*arguments: str | Path) -> Result:
    threads = torch.get_num_threads()  # the runs set their own
    try:
        return run_harts("train", *arguments)
    finally:
        torch.set_num_threads(threads)


def test_help_starts_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['harts', 'train', '--help']\n"
        "from harts_cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'numba', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--tree" in done.stdout


def test_a_run_and_its_folder(tmp_path: Path) -> None:
    tree, shared, expanded = write_inputs(tmp_path, dp=2)
    config = write_config(tmp_path)
    done = harts(shared, "--tree", tree, "--config", config, "--out", tmp_path / "run", "--steps", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 2"]
    assert done.stderr == ""  # progress is for terminals
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.json",
        "metrics.jsonl",
    ]
    resolved = json.loads((tmp_path / "run" / "config.json").read_text())
    expected = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.05}
    assert {key: resolved["objective"][key] for key in expected} == expected
    assert resolved["model"]["hidden_size"] == 64
    assert read_state(tmp_path / "run" / "checkpoints" / "step-000002").step == 2

    again = harts(
        *(expanded, "--tree", tree, "--config", config, "--out", tmp_path / "other", "--steps", "2", "--json")
    )
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert report["steps_before"] == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for ours, theirs in zip(records, report["steps"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
        assert ours["compact_tokens"] < theirs["compact_tokens"] == ours["original_tokens"]

    more = harts(shared, "--tree", tree, "--config", config, "--out", tmp_path / "run", "--resume")
    assert more.returncode == 0
    assert "nothing to do" in more.stdout


def test_mistakes_end_in_a_message_and_leave_nothing(tmp_path: Path) -> None:
    tree, shared, _ = write_inputs(tmp_path)
    config = write_config(tmp_path)
    other = tmp_path / "other.arrow"
    write_tree(other, random_tree(99))
    broken = tmp_path / "broken.toml"
    broken.write_text("[runtime]\ndtpye = 'float32'\n")
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    options = {"--tree": tree, "--config": config, "--out": tmp_path / "run"}
    cases = [
        ({"--config": broken}, 2, "did you mean dtype?"),
        ({"--config": tmp_path / "absent.toml"}, 2, "cannot be read"),
        ({"--tree": other}, 4, "the plan is for another rollout tree"),
        ({"--tree": tmp_path / "absent.arrow"}, 3, "no such file"),
        ({"--out": full}, 2, "the run folder is not empty"),
        ({"--out": tmp_path / "a" / "b"}, 3, "the output folder does not exist"),
        ({"--checkpoint": tmp_path}, 3, "not a checkpoint: no config.json"),
    ]
    for changes, code, message in cases:
        arguments = [str(x) for pair in (options | changes).items() for x in pair]
        done = harts(shared, *arguments)
        assert done.returncode == code, (changes, done.stderr)
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    gspo = write_config(tmp_path).with_name("gspo.toml")
    gspo.write_text(config.read_text().replace("[objective]", '[objective]\nname = "gspo"'))
    split = tmp_path / "split"
    run_harts(
        *("plan", tree, "-o", split, "--dp", "1", "--capacity", "40", "--chunk", "16"),
        *("--planner", "psrl", "--on-too-long", "split"),
    )
    done = harts(split, *(str(x) for pair in (options | {"--config": gspo}).items() for x in pair))
    assert done.returncode == 2, done.stderr
    assert f"where: {split}, row " in done.stderr
    done = harts(tmp_path, *(str(x) for pair in options.items() for x in pair))
    assert done.returncode == 3
    assert "not a plan bundle" in done.stderr
    assert not (tmp_path / "run").exists()
    assert [p.name for p in full.iterdir()] == ["thesis.txt"]


def test_without_torch_the_install_command_is_named(tmp_path: Path) -> None:
    tree, shared, _ = write_inputs(tmp_path)
    config = write_config(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['harts', 'train', {str(shared)!r}, '--tree', {str(tree)!r}, '--config', "
        f"{str(config)!r}, '--out', {str(tmp_path / 'run')!r}]\n"
        "from harts_cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert "training needs torch" in done.stderr
    assert "pip install 'harts[train]'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_kill_9_leaves_a_checkpoint_that_resumes_to_the_same_weights(tmp_path: Path) -> None:
    tree, shared, _ = write_inputs(tmp_path)
    config = write_config(tmp_path, every=1, keep=2)
    common = [str(shared), "--tree", str(tree), "--config", str(config), "--steps", "20"]
    straight = harts(*common, "--out", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr

    out = tmp_path / "run"
    command = [sys.executable, "-m", "harts_cli.main", "train", *common, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT)
    deadline = time.monotonic() + 60
    while len(list_checkpoints(out / "checkpoints")) < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.close()
    assert process.returncode == -signal.SIGKILL
    done = read_state(list_checkpoints(out / "checkpoints")[-1]).step
    assert 2 <= done < 20

    resumed = harts(*common, "--out", out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        last = Path("checkpoints") / "step-000020" / name
        assert (out / last).read_bytes() == (tmp_path / "straight" / last).read_bytes()
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 21))
