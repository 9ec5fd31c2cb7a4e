"""The batch script on a real Slurm of one machine: two ranks to the end, also after a requeue."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.distributed.slurm_cluster import can_run, cluster
from tests.support_train import TOML, write_inputs

STEPS = 40
"""So many that the job is not over before it is told to stop."""


def submit(folder: Path, env: dict[str, str], out: str) -> str:
    """The job's id."""
    script = ROOT / "slurm" / "harts-train.sbatch"
    options = ["--parsable", "--ntasks", "2", "--nodes", "2", "--output", str(folder / f"{out}.log")]
    files = ["--tree", str(folder / "tree.arrow"), "--config", str(folder / "train.toml")]
    arguments = [str(folder / "shared"), *files, "--out", str(folder / out), "--steps", str(STEPS)]
    command = ["sbatch", *options, str(script), *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def state(job: str, env: dict[str, str]) -> str:
    text = subprocess.run(
        ["scontrol", "show", "job", job], env=env, capture_output=True, text=True, check=True
    ).stdout
    return text.split("JobState=")[1].split()[0]


def nodes_are_idle(env: dict[str, str]) -> bool:
    """Whether nothing of an earlier job is left on a node."""
    command = ["sinfo", "--noheader", "--Node", "--format", "%T"]
    states = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
    return set(states) == {"idle"}


def wait_for(condition: object, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "the job did not get that far"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.skipif(not can_run(), reason="Slurm is not installed, or this user cannot start it")
def test_job_survives_a_requeue(tmp_path: Path) -> None:
    write_inputs(tmp_path, dp=2, slots=2)
    text = TOML.format(dtype="float32", every=1, keep=2)
    (tmp_path / "train.toml").write_text(text + "\n[parallel]\ndp = 2\nep = 2\ntimeout_s = 60\n")
    program = tmp_path / "harts"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m harts_cli.main "$@"\n')
    program.chmod(0o755)
    last = f"checkpoints/step-{STEPS:06d}"
    with cluster(tmp_path) as env:
        env |= {"HARTS": str(program), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        env["MASTER_ADDR"] = "127.0.0.1"  # the virtual nodes' names are in no name service
        job = submit(tmp_path, env, "whole")
        wait_for(lambda: state(job, env) in ("COMPLETED", "FAILED"))
        assert state(job, env) == "COMPLETED", (tmp_path / "whole.log").read_text()

        job = submit(tmp_path, env, "cut")
        metrics = tmp_path / "cut" / "metrics.jsonl"
        wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3)
        subprocess.run(["scontrol", "requeue", job], env=env, check=True)
        assert metrics.read_text().count("\n") < STEPS
        # for two minutes, unless told otherwise; Slurm takes the end of the first start for that of a second
        # one that comes too soon
        wait_for(lambda: state(job, env) == "PENDING" and nodes_are_idle(env))
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=env, check=False)
        wait_for(lambda: state(job, env) in ("COMPLETED", "FAILED"), 300)
        assert state(job, env) == "COMPLETED", (tmp_path / "cut.log").read_text()
    for part in ("__0_0.distcp", "__1_0.distcp"):
        cut, whole = (tmp_path / out / last / part for out in ("cut", "whole"))
        assert cut.read_bytes() == whole.read_bytes()
    steps = [line.split(",")[0] for line in metrics.read_text().splitlines()]
    assert steps == [f'{{"step": {i + 1}' for i in range(STEPS)]
