"""Run the program with its error boundary, in this process (fast) or in a fresh one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from harts_cli.main import main
from harts_cli.output import COMPILING

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run of the program left."""

    returncode: int
    stdout: str
    stderr: str


def run_harts(*arguments: str | Path) -> Result:
    """Run ``harts`` with the arguments in this process, through the real ``main`` and its error boundary."""
    out, err = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    with (
        mock.patch.object(sys, "argv", ["harts", *map(str, arguments)]),
        mock.patch.dict(os.environ, {"COLUMNS": "120"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    return Result(returncode=int(code or 0), stdout=out.getvalue(), stderr=_without_notice(err.getvalue()))


def run_harts_process(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    """Run ``harts`` with the arguments in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "harts_cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120", **(env or {})},
        check=False,
        timeout=300,
    )
    return Result(returncode=done.returncode, stdout=done.stdout, stderr=_without_notice(done.stderr))


def _without_notice(stderr: str) -> str:
    """Whether kernels are compiled depends on what ran before on this machine."""
    return stderr.replace(COMPILING, "")
