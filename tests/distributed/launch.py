"""Starts the processes of a distributed test on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.architecture.source import ROOT
from tests.distributed.cases import Case, Result


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(arguments: Sequence[str], num_processes: int, *, folder: Path) -> list[subprocess.Popen[str]]:
    """``python …`` in every rank, as torchrun would; each one's output goes to ``folder/rank-N.log``."""
    port = free_port()
    processes = []
    for rank in range(num_processes):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        with open(folder / f"rank-{rank}.log", "w") as log:
            command = [sys.executable, *arguments]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, text=True))
    return processes


def run(arguments: Sequence[str], num_processes: int, *, folder: Path, timeout_s: float = 560) -> list[int]:
    """Start, wait for all, return the exit codes; the logs of failed ranks are in the assertion's message."""
    processes = start(arguments, num_processes, folder=folder)
    try:
        return [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_cases(cases: Sequence[Case], *, folder: Path) -> list[Result]:
    """Run cases of one number of processes, one after another in the same processes."""
    torch.save(list(cases), folder / "cases.pt")
    arguments = ["-m", "tests.distributed.worker", str(folder / "cases.pt"), str(folder / "results.pt")]
    (count,) = {case.num_processes for case in cases}
    codes = run(arguments, count, folder=folder)
    logs = "\n".join((folder / f"rank-{rank}.log").read_text() for rank in range(count) if codes[rank])
    assert not any(codes), logs
    results: list[Result] = torch.load(folder / "results.pt", weights_only=False)
    return results
